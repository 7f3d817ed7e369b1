"""Models: the built-in decoder, and the way from a job's ``model`` section to a module."""

from elastic_ft.models.build import block_modules, build_model, computed_buffers, initial_state
from elastic_ft.models.decoder import PRESETS, Decoder, DecoderConfig
from elastic_ft.models.loss import loss_sum
