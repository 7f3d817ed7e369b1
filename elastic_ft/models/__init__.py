"""Models: the built-in decoder, and the way from a job's ``model`` section to a module."""

from elastic_ft.models.build import block_modules as block_modules
from elastic_ft.models.build import build_model as build_model
from elastic_ft.models.build import computed_buffers as computed_buffers
from elastic_ft.models.build import initial_state as initial_state
from elastic_ft.models.decoder import PRESETS as PRESETS
from elastic_ft.models.decoder import Decoder as Decoder
from elastic_ft.models.decoder import DecoderConfig as DecoderConfig
from elastic_ft.models.loss import loss_sum as loss_sum
