"""The S3 server of the tests is that of chaos runs."""

from chaos.s3_server import S3Server, s3_server

__all__ = ["S3Server", "s3_server"]
