"""What a job reads, and when. ``ElasticSampler`` and ``Mixture`` need nothing but Python."""

from elastic_ft.data.mixture import Mixture as Mixture
from elastic_ft.data.sampler import ElasticSampler as ElasticSampler
