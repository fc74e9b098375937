"""shardboot: the boot-time daemon of an inference image.

Makes sure that a checkpoint of pre-sharded weights made for exactly this model, topology and
vLLM lies on the local disk, then becomes vLLM on it.
"""

__version__ = "0.1.0"
