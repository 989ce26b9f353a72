"""Layers: every attention mechanism as a module over the operator."""

from .attention import Attention
from .blocks import DecoderBlock, EncoderBlock
from .cache import KeyValues, KVCache, SegmentMemory
from .core import Core
from .differential import DifferentialAttention
from .embeddings import (
    CharacterEmbedding,
    ConcatEmbedding,
    ContextualEmbedding,
    Frozen,
    SubwordEmbedding,
    SumEmbedding,
    TokenEmbedding,
)
from .feedforward import FeedForward, GatedFeedForward
from .latent import LatentAttention
from .learned_terms import LearnedCosine, LearnedDot, LearnedSink
from .local_recurrent import LocalAttention
from .losses import Loss, cross_entropy
from .memory_slots import MemorySlots
from .modulate import Modulate
from .norms import PostNorm, PreNorm, RMSNorm
from .pooling import AttentionPool
from .positions import LearnedPositions, Rotary, ShawBias, Sinusoidal, T5Bias, positions_of
from .recurrent import (
    BahdanauAttention,
    ConcatScore,
    Coverage,
    DotScore,
    GeneralScore,
    LocationScore,
    LuongAttention,
    Memory,
)
from .row_starts import PackedLengths
from .vision import CBAM, PatchEmbedding, SelectiveKernel, SelfAttention2d, SqueezeExcite

__all__ = [
    "CBAM",
    "Attention",
    "AttentionPool",
    "BahdanauAttention",
    "CharacterEmbedding",
    "ConcatEmbedding",
    "ConcatScore",
    "ContextualEmbedding",
    "Core",
    "Coverage",
    "DecoderBlock",
    "DifferentialAttention",
    "DotScore",
    "EncoderBlock",
    "FeedForward",
    "Frozen",
    "GatedFeedForward",
    "GeneralScore",
    "KVCache",
    "KeyValues",
    "LatentAttention",
    "LearnedCosine",
    "LearnedDot",
    "LearnedPositions",
    "LearnedSink",
    "LocalAttention",
    "LocationScore",
    "Loss",
    "LuongAttention",
    "Memory",
    "MemorySlots",
    "Modulate",
    "PackedLengths",
    "PatchEmbedding",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "Rotary",
    "SegmentMemory",
    "SelectiveKernel",
    "SelfAttention2d",
    "ShawBias",
    "Sinusoidal",
    "SqueezeExcite",
    "SubwordEmbedding",
    "SumEmbedding",
    "T5Bias",
    "TokenEmbedding",
    "cross_entropy",
    "positions_of",
]
