"""Packages by lucidrains: one idea of attention a package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from .case import Case
from .small_sizes import row, table

SIZES = {"dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "num_tokens": 50, "seq_len": 16, "max_seq_len": 16}


def ids() -> tuple[Tensor]:
    return (torch.randint(1, 50, (2, 16)),)


def x() -> tuple[Tensor]:
    return (torch.randn(2, 16, 32),)


def random(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that makes random tensors of these shapes."""
    return lambda: tuple(map(torch.randn, shapes))


picture, maps = random((2, 3, 32, 32)), random((2, 16, 6, 6))
columns = lambda: (torch.randint(0, 3, (4, 3)), torch.randn(4, 2))  # noqa: E731
LATENTS = {"num_latents": 8, "latent_dim": 32, "latent_heads": 4, "latent_dim_head": 8}
CROSS = {"cross_heads": 2, "cross_dim_head": 8}
BANDS = {"num_freq_bands": 3, "max_freq": 8.0, "num_classes": 5, "self_per_cross_attn": 2}
LIGHT = {"light_dim_head": 8, "light_heads": 2, "light_window_size": 4, "heavy_dim_head": 8, "heavy_heads": 2}
SERIES = {"num_variates": 5, "lookback_len": 12, "pred_length": 3}
MEGA = {"ema_heads": 4, "attn_dim_qk": 16, "attn_dim_value": 32}
TABLE = {"categories": (3, 4, 5), "num_continuous": 2, "dim_out": 1}


def enformer() -> Iterator[Case]:
    from enformer_pytorch import Enformer, EnformerConfig

    sizes = {"dim": 48, "depth": 2, "heads": 4, "attn_dim_key": 8, "dim_divisible_by": 4, "num_downsamples": 3}
    config = EnformerConfig(**sizes, output_heads={"human": 3}, target_length=2)
    yield Case(name="Enformer", build=lambda: Enformer(config), inputs=lambda: (torch.randint(0, 5, (2, 64)),))


def coca() -> Iterator[Case]:
    from coca_pytorch.coca_pytorch import CoCa
    from vit_pytorch.extractor import Extractor
    from vit_pytorch.simple_vit_with_patch_dropout import SimpleViT

    def build() -> nn.Module:
        sizes = {"dim": 32, "heads": 4}
        vit = SimpleViT(**sizes, image_size=32, patch_size=8, num_classes=5, depth=1, mlp_dim=32, patch_dropout=0.0)
        encoder = Extractor(vit, return_embeddings_only=True, detach=False)
        depths = {"unimodal_depth": 1, "multimodal_depth": 1}
        return CoCa(**sizes, **depths, img_encoder=encoder, image_dim=32, num_tokens=50, dim_head=8)

    yield Case(
        name="CoCa",
        build=build,
        inputs=lambda: (*ids(), *picture()),
        call=lambda model, text, images: model(text=text, images=images),
    )


class After(nn.Module):
    """A plain attention, and a mixture of experts that follows."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.experts = experts

    def forward(self, x: Tensor) -> object:
        out, _ = self.attention(x, x, x, need_weights=False)
        return self.experts(out)


def moe() -> Iterator[Case]:
    from soft_moe_pytorch import SoftMoE
    from st_moe_pytorch import MoE, SparseMoEBlock

    experts = {
        "SoftMoE": lambda: SoftMoE(dim=32, seq_len=16, num_experts=4),
        "ST-MoE": lambda: MoE(dim=32, num_experts=4, gating_top_n=2),
        "an ST-MoE block": lambda: SparseMoEBlock(MoE(dim=32, num_experts=4, gating_top_n=2)),
    }
    for name, build in experts.items():
        yield Case(name=f"attention, then {name}", build=lambda build=build: After(build()), inputs=x)


def rotary() -> Iterator[Case]:
    from rotary_embedding_torch import RotaryEmbedding

    class Rotated(nn.Module):
        """Attention whose queries and keys the library rotates."""

        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(dim=4)
            self.project = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
            q, k = (self.rotary.rotate_queries_or_keys(y) for y in (q, k))
            return ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    yield Case(name="rotated queries and keys", build=Rotated, inputs=x)


cases = partial(table, SIZES)
LIBRARIES = {
    "perceiver-pytorch": cases(
        *(
            row(
                "perceiver_pytorch:Perceiver",
                random((2, 8, 8, 3)),
                LATENTS | CROSS | BANDS,
                {"weight_tie_layers": tied},
                name=f"Perceiver{', tied' * tied}",
            )
            for tied in (False, True)
        ),
        row(
            "perceiver_pytorch:PerceiverIO",
            random((2, 16, 32), (2, 7, 32)),
            LATENTS | CROSS | {"queries_dim": 32, "logits_dim": 5},
            name="Perceiver IO",
            call=lambda model, data, queries: model(data, queries=queries),
        ),
    ),
    "linformer": cases(
        row("linformer:Linformer", x, k=8, dim_head=None),
        row(
            "linformer:LinformerLM",
            ids,
            name="LinformerLM, shared keys",
            k=8,
            dim_head=None,
            one_kv_head=True,
            share_kv=True,
        ),
        row(
            "linformer:LinformerSelfAttention",
            random((2, 16, 32), (2, 16, 32)),
            name="cross attention",
            k=8,
            dim_head=None,
            one_kv_head=True,
        ),
    ),
    "local-attention": cases(
        *(
            row("local_attention:LocalAttention", random(*[(2, 4, 16, 8)] * 3), given, name=name, window_size=4, dim=8)
            for name, given in {
                "LocalAttention, causal": {"causal": True},
                "LocalAttention, both sides": {"look_forward": 1},
                "LocalAttention, exact": {"causal": True, "exact_windowsize": True},
                "LocalAttention, shared qk": {"causal": True, "shared_qk": True},
            }.items()
        ),
        row("local_attention:LocalMHA", x, window_size=4, causal=True),
        row("local_attention:LocalTransformer", ids, max_seq_len=32, local_attn_window_size=4, heads=8),
    ),
    "axial-attention": cases(
        row("axial_attention:AxialAttention", random((2, 32, 5, 7)), dim_index=1, num_dimensions=2),
        row(
            "axial_attention:AxialImageTransformer",
            random((2, 32, 6, 6)),
            name="AxialImageTransformer, reversible",
            reversible=True,
        ),
    ),
    "nystrom-attention": cases(
        row("nystrom_attention:NystromAttention", x, num_landmarks=4),
        row("nystrom_attention:Nystromformer", x, num_landmarks=4),
    ),
    "performer-pytorch": cases(
        row("performer_pytorch:Performer", x),
        row(
            "performer_pytorch:PerformerLM",
            ids,
            name="PerformerLM with local heads",
            local_attn_heads=2,
            local_window_size=8,
            causal=False,
        ),
    ),
    "reformer-pytorch": cases(
        row("reformer_pytorch:LSHSelfAttention", x, batched=False, bucket_size=4, n_hashes=2),
        row(
            "reformer_pytorch:ReformerLM",
            ids,
            {"bucket_size": 4, "n_hashes": 2, "n_local_attn_heads": 2, "causal": True, "dim_head": 64},
            name="ReformerLM with local heads",
            batched=False,
        ),
    ),
    "routing-transformer": cases(
        row("routing_transformer:RoutingTransformer", x, batched=False, window_size=8),
        row(
            "routing_transformer:RoutingTransformerLM",
            ids,
            {"window_size": 8, "n_local_attn_heads": 2, "causal": True, "dim_head": 64},
            name="RoutingTransformerLM with local heads",
            batched=False,
        ),
    ),
    "sinkhorn-transformer": cases(
        *(
            row(
                "sinkhorn_transformer:SinkhornTransformerLM",
                ids,
                name=name,
                batched=False,
                bucket_size=4,
                n_local_attn_heads=local,
            )
            for local, name in {0: "SinkhornTransformerLM", 2: "SinkhornTransformerLM, local heads"}.items()
        )
    ),
    "linear-attention-transformer": cases(
        *(
            row(
                "linear_attention_transformer:LinearAttentionTransformerLM",
                ids,
                {"n_local_attn_heads": local, "local_attn_window_size": 4, "causal": False, "dim_head": 64},
                name=f"LinearAttentionTransformerLM{', local heads' * bool(local)}",
            )
            for local in (0, 2)
        )
    ),
    "CoLT5-attention": cases(
        row(
            "colt5_attention:ConditionalRoutedAttention",
            x,
            LIGHT,
            {"num_heavy_tokens_q": 4, "num_heavy_tokens_kv": 4},
            batched=False,
        ),
        row(
            "colt5_attention:ConditionalRoutedTransformerBlock",
            x,
            LIGHT,
            {"num_heavy_attn_tokens_q": 4, "num_heavy_attn_tokens_kv": 4, "num_heavy_ff_tokens": 4},
            batched=False,
        ),
    ),
    "denoising-diffusion-pytorch": cases(
        row("denoising_diffusion_pytorch.denoising_diffusion_pytorch:Attention", maps, dim=16, dim_head=16),
        row(
            "denoising_diffusion_pytorch.denoising_diffusion_pytorch:Attention",
            maps,
            {"dim": 16, "dim_head": 16, "flash": True},
            name="Attention, flash",
        ),
        row("denoising_diffusion_pytorch.denoising_diffusion_pytorch:LinearAttention", maps, dim=16, dim_head=16),
        *(
            row(
                "denoising_diffusion_pytorch:Unet",
                lambda: (torch.randn(2, 3, 8, 8), torch.tensor([3, 5])),
                {"dim": 8, "dim_mults": (1, 2), "full_attn": (full, True), "attn_dim_head": 8},
                name=f"Unet{', full attention' * full}",
            )
            for full in (False, True)
        ),
    ),
    "enformer-pytorch": enformer,
    "CoCa-pytorch": coca,
    "block-recurrent-transformer-pytorch": cases(
        row(
            "block_recurrent_transformer_pytorch:BlockRecurrentTransformer",
            ids,
            {"block_width": 8, "num_state_vectors": 4, "recurrent_layers": (2,)},
        ),
    ),
    "PaLM-rlhf-pytorch": cases(
        row("palm_rlhf_pytorch:PaLM", ids),
        row("palm_rlhf_pytorch:PaLM", ids, name="PaLM, flash", flash_attn=True),
    ),
    "x-clip": cases(
        row(
            "x_clip:CLIP",
            lambda: (*ids(), *picture()),
            {"dim_text": 32, "dim_image": 32, "dim_latent": 16, "num_text_tokens": 50, "text_enc_depth": 1},
            {"text_seq_len": 16, "text_heads": 4, "text_dim_head": 8, "visual_enc_depth": 1, "visual_image_size": 32},
            {"visual_patch_size": 8, "visual_heads": 4, "visual_dim_head": 8, "visual_patch_dropout": 0.0},
        ),
    ),
    "titans-pytorch": cases(
        row("titans_pytorch.mac_transformer:SegmentedAttention", x, segment_len=8, num_persist_mem_tokens=2),
        row(
            "titans_pytorch:MemoryAsContextTransformer",
            ids,
            {"segment_len": 8, "num_persist_mem_tokens": 2, "num_longterm_mem_tokens": 2, "neural_memory_layers": ()},
        ),
    ),
    "mega-pytorch": cases(
        row("mega_pytorch:MegaLayer", x, MEGA, laplacian_attn_fn=False),
        row("mega_pytorch:MegaLayer", x, MEGA, name="MegaLayer, Laplacian", laplacian_attn_fn=True),
        row("mega_pytorch:Mega", ids, MEGA, laplacian_attn_fn=False),
    ),
    "soft-moe-pytorch": moe,
    "hourglass-transformer-pytorch": cases(
        row("hourglass_transformer_pytorch:HourglassTransformerLM", ids, shorten_factor=2, depth=(1, 1, 1)),
    ),
    "tab-transformer-pytorch": cases(
        row("tab_transformer_pytorch:TabTransformer", columns, TABLE, mlp_act=nn.ReLU()),
        row("tab_transformer_pytorch:FTTransformer", columns, TABLE),
    ),
    "iTransformer": cases(
        *(
            row(
                "iTransformer:iTransformer",
                random((4, 12, 5)),
                SERIES,
                name=f"iTransformer{', flash' * flash}",
                flash_attn=flash,
            )
            for flash in (False, True)
        ),
        row("iTransformer:iTransformer2D", random((4, 12, 5)), SERIES, num_time_tokens=4, flash_attn=False),
    ),
    "memorizing-transformers-pytorch": cases(
        row(
            "memorizing_transformers_pytorch:MemorizingTransformer",
            ids,
            {"memorizing_layers": (9,), "max_knn_memories": 64, "num_retrieved_memories": 4},
            call=lambda model, x: model(x, knn_memories=model.create_knn_memories(batch_size=2)),
        ),
    ),
    "segformer-pytorch": cases(
        row(
            "segformer_pytorch:Segformer",
            random((2, 3, 64, 64)),
            {"dims": (8, 16, 16, 32), "heads": (1, 2, 2, 4), "reduction_ratio": (8, 4, 2, 1)},
            {"num_layers": 1, "decoder_dim": 16, "num_classes": 3},
        ),
    ),
    "slot-attention": cases(
        row("slot_attention:SlotAttention", x, num_slots=3, iters=2),
        row("slot_attention:MultiHeadSlotAttention", x, num_slots=3, iters=2, dim_head=64),
    ),
    "rotary-embedding-torch": rotary,
    "taylor-series-linear-attention": cases(
        row("taylor_series_linear_attention:TaylorSeriesLinearAttn", x, dim_head=4),
    ),
    "bottleneck-transformer-pytorch": cases(
        row(
            "bottleneck_transformer_pytorch:BottleStack",
            random((2, 8, 8, 8)),
            {"dim": 8, "fmap_size": 8, "dim_out": 16, "proj_factor": 2, "num_layers": 2},
        ),
    ),
    "halonet-pytorch": cases(
        row("halonet_pytorch:HaloAttention", random((2, 16, 8, 8)), dim=16, block_size=4, halo_size=2),
    ),
    "lambda-networks": cases(
        row(
            "lambda_networks:LambdaLayer",
            random((2, 16, 8, 8)),
            {"dim": 16, "dim_out": 16, "n": 8, "dim_k": 4, "dim_u": 1},
        ),
    ),
    "ring-attention-pytorch": cases(
        row(
            "ring_attention_pytorch:RingAttention",
            x,
            {"causal": True, "ring_attn": False, "striped_ring_attn": False, "use_cuda_kernel": False},
            name="RingAttention on one device",
        ),
    ),
}
