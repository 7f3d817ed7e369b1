"""What a job reads, and when. The names here need nothing but Python."""

from elastic_ft.data.elastic_stream import ElasticStream as ElasticStream
from elastic_ft.data.mixture import Mixture as Mixture
from elastic_ft.data.sampler import ElasticSampler as ElasticSampler
