"""Packages by lucidrains: one idea of attention a package."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from .case import Case


def ids(b: int = 2, n: int = 16, classes: int = 50) -> tuple[torch.Tensor]:
    return (torch.randint(1, classes, (b, n)),)


def x(b: int = 2, n: int = 16, dim: int = 32) -> tuple[torch.Tensor]:
    return (torch.randn(b, n, dim),)


def picture(b: int = 2, side: int = 32) -> tuple[torch.Tensor]:
    return (torch.randn(b, 3, side, side),)


def perceiver() -> Iterator[Case]:
    from perceiver_pytorch import Perceiver, PerceiverIO

    given = {"num_freq_bands": 3, "max_freq": 8.0, "depth": 2, "num_latents": 8, "latent_dim": 32, "num_classes": 5}
    sizes = {"cross_heads": 2, "latent_heads": 4, "cross_dim_head": 8, "latent_dim_head": 8}
    picture_last = lambda: (torch.randn(2, 8, 8, 3),)  # noqa: E731
    for tied in (False, True):
        yield Case(
            name=f"Perceiver{', tied' * tied}",
            build=partial(Perceiver, **given, **sizes, weight_tie_layers=tied, self_per_cross_attn=2),
            inputs=picture_last,
        )
    yield Case(
        name="Perceiver IO",
        build=partial(
            PerceiverIO, dim=32, queries_dim=32, logits_dim=5, depth=2, num_latents=8, latent_dim=32, **sizes
        ),
        inputs=lambda: (torch.randn(2, 16, 32), torch.randn(2, 7, 32)),
        call=lambda model, data, queries: model(data, queries=queries),
    )


def linformer() -> Iterator[Case]:
    from linformer import Linformer, LinformerLM, LinformerSelfAttention

    yield Case(name="Linformer", build=partial(Linformer, dim=32, seq_len=16, depth=2, heads=4, k=8), inputs=x)
    yield Case(
        name="LinformerLM, shared keys",
        build=partial(
            LinformerLM, num_tokens=50, dim=32, seq_len=16, depth=2, heads=4, k=8, one_kv_head=True, share_kv=True
        ),
        inputs=ids,
    )
    yield Case(
        name="cross attention",
        build=partial(LinformerSelfAttention, dim=32, seq_len=16, heads=4, k=8, one_kv_head=True),
        inputs=lambda: (torch.randn(2, 16, 32), torch.randn(2, 16, 32)),
    )


def local_attention() -> Iterator[Case]:
    from local_attention import LocalAttention, LocalMHA, LocalTransformer

    heads = lambda: tuple(torch.randn(2, 4, 16, 8) for _ in range(3))  # noqa: E731
    for name, given in {
        "causal": {"causal": True},
        "both sides": {"look_forward": 1},
        "exact": {"causal": True, "exact_windowsize": True},
        "shared qk": {"causal": True, "shared_qk": True},
    }.items():
        yield Case(
            name=f"LocalAttention, {name}",
            build=partial(LocalAttention, window_size=4, dim=8, **given),
            inputs=heads,
        )
    yield Case(
        name="LocalMHA", build=partial(LocalMHA, dim=32, window_size=4, heads=4, dim_head=8, causal=True), inputs=x
    )
    yield Case(
        name="LocalTransformer",
        build=partial(
            LocalTransformer, num_tokens=50, dim=32, depth=2, max_seq_len=32, local_attn_window_size=4, dim_head=8
        ),
        inputs=ids,
    )


def axial_attention() -> Iterator[Case]:
    from axial_attention import AxialAttention, AxialImageTransformer

    yield Case(
        name="AxialAttention",
        build=partial(AxialAttention, dim=32, dim_index=1, heads=4, num_dimensions=2),
        inputs=lambda: (torch.randn(2, 32, 5, 7),),
    )
    yield Case(
        name="AxialImageTransformer, reversible",
        build=partial(AxialImageTransformer, dim=32, depth=2, heads=4, reversible=True),
        inputs=lambda: (torch.randn(2, 32, 6, 6),),
    )


def nystrom() -> Iterator[Case]:
    from nystrom_attention import NystromAttention, Nystromformer

    yield Case(
        name="NystromAttention", build=partial(NystromAttention, dim=32, heads=4, dim_head=8, num_landmarks=4), inputs=x
    )
    yield Case(
        name="Nystromformer",
        build=partial(Nystromformer, dim=32, depth=2, heads=4, dim_head=8, num_landmarks=4),
        inputs=x,
    )


def performer() -> Iterator[Case]:
    from performer_pytorch import Performer, PerformerLM

    yield Case(name="Performer", build=partial(Performer, dim=32, depth=2, heads=4, dim_head=8), inputs=x)
    yield Case(
        name="PerformerLM with local heads",
        build=partial(
            PerformerLM,
            num_tokens=50,
            max_seq_len=16,
            dim=32,
            depth=2,
            heads=4,
            dim_head=8,
            local_attn_heads=2,
            local_window_size=8,
            causal=False,
        ),
        inputs=ids,
    )


def reformer() -> Iterator[Case]:
    from reformer_pytorch import LSHSelfAttention, ReformerLM

    yield Case(
        name="LSHSelfAttention",
        build=partial(LSHSelfAttention, dim=32, heads=4, bucket_size=4, n_hashes=2),
        inputs=x,
        batched=False,
    )
    yield Case(
        name="ReformerLM with local heads",
        build=partial(
            ReformerLM,
            num_tokens=50,
            dim=32,
            depth=2,
            max_seq_len=16,
            heads=4,
            bucket_size=4,
            n_hashes=2,
            n_local_attn_heads=2,
            causal=True,
        ),
        inputs=ids,
        batched=False,
    )


def routing() -> Iterator[Case]:
    from routing_transformer import RoutingTransformer, RoutingTransformerLM

    yield Case(
        name="RoutingTransformer",
        build=partial(RoutingTransformer, dim=32, depth=2, heads=4, max_seq_len=16, window_size=8),
        inputs=x,
        batched=False,
    )
    yield Case(
        name="RoutingTransformerLM with local heads",
        build=partial(
            RoutingTransformerLM,
            num_tokens=50,
            dim=32,
            depth=2,
            heads=4,
            max_seq_len=16,
            window_size=8,
            n_local_attn_heads=2,
            causal=True,
        ),
        inputs=ids,
        batched=False,
    )


def sinkhorn() -> Iterator[Case]:
    from sinkhorn_transformer import SinkhornTransformerLM

    for local in (0, 2):
        yield Case(
            name=f"SinkhornTransformerLM{', local heads' if local else ''}",
            build=partial(
                SinkhornTransformerLM,
                num_tokens=50,
                dim=32,
                heads=4,
                depth=2,
                bucket_size=4,
                max_seq_len=16,
                n_local_attn_heads=local,
            ),
            inputs=ids,
            batched=False,
        )


def linear() -> Iterator[Case]:
    from linear_attention_transformer import LinearAttentionTransformerLM

    for local in (0, 2):
        yield Case(
            name=f"LinearAttentionTransformerLM{', local heads' if local else ''}",
            build=partial(
                LinearAttentionTransformerLM,
                num_tokens=50,
                dim=32,
                heads=4,
                depth=2,
                max_seq_len=16,
                n_local_attn_heads=local,
                local_attn_window_size=4,
                causal=False,
            ),
            inputs=ids,
        )


def colt5() -> Iterator[Case]:
    from colt5_attention import ConditionalRoutedAttention, ConditionalRoutedTransformerBlock

    given = {
        "light_dim_head": 8,
        "light_heads": 2,
        "light_window_size": 4,
        "heavy_dim_head": 8,
        "heavy_heads": 2,
        "num_heavy_tokens_q": 4,
        "num_heavy_tokens_kv": 4,
    }
    yield Case(
        name="ConditionalRoutedAttention",
        build=partial(ConditionalRoutedAttention, dim=32, **given),
        inputs=x,
        batched=False,
    )
    yield Case(
        name="ConditionalRoutedTransformerBlock",
        build=partial(
            ConditionalRoutedTransformerBlock,
            dim=32,
            num_heavy_attn_tokens_q=4,
            num_heavy_attn_tokens_kv=4,
            num_heavy_ff_tokens=4,
            light_dim_head=8,
            light_heads=2,
            light_window_size=4,
            heavy_dim_head=8,
            heavy_heads=2,
        ),
        inputs=x,
        batched=False,
    )


def denoising() -> Iterator[Case]:
    from denoising_diffusion_pytorch import Unet
    from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Attention, LinearAttention

    maps = lambda: (torch.randn(2, 16, 6, 6),)  # noqa: E731
    yield Case(name="Attention", build=partial(Attention, 16, heads=4, dim_head=16), inputs=maps)
    yield Case(name="Attention, flash", build=partial(Attention, 16, heads=4, dim_head=16, flash=True), inputs=maps)
    yield Case(name="LinearAttention", build=partial(LinearAttention, 16, heads=4, dim_head=16), inputs=maps)
    for full in (False, True):
        yield Case(
            name=f"Unet{', full attention' * full}",
            build=partial(Unet, 8, dim_mults=(1, 2), full_attn=(full, True), attn_dim_head=8),
            inputs=lambda: (torch.randn(2, 3, 8, 8), torch.tensor([3, 5])),
        )


def enformer() -> Iterator[Case]:
    from enformer_pytorch import Enformer, EnformerConfig

    yield Case(
        name="Enformer",
        build=lambda: Enformer(
            EnformerConfig(
                dim=48,
                depth=2,
                heads=4,
                output_heads={"human": 3},
                target_length=2,
                attn_dim_key=8,
                dim_divisible_by=4,
                num_downsamples=3,
            )
        ),
        inputs=lambda: (torch.randint(0, 5, (2, 64)),),
    )


def coca() -> Iterator[Case]:
    from coca_pytorch.coca_pytorch import CoCa
    from vit_pytorch.extractor import Extractor
    from vit_pytorch.simple_vit_with_patch_dropout import SimpleViT

    def build() -> nn.Module:
        vit = SimpleViT(
            image_size=32, patch_size=8, num_classes=5, dim=32, depth=1, heads=4, mlp_dim=32, patch_dropout=0.0
        )
        encoder = Extractor(vit, return_embeddings_only=True, detach=False)
        return CoCa(
            dim=32,
            img_encoder=encoder,
            image_dim=32,
            num_tokens=50,
            unimodal_depth=1,
            multimodal_depth=1,
            dim_head=8,
            heads=4,
        )

    yield Case(
        name="CoCa",
        build=build,
        inputs=lambda: (*ids(), *picture()),
        call=lambda model, text, images: model(text=text, images=images),
    )


def recurrent() -> Iterator[Case]:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    yield Case(
        name="BlockRecurrentTransformer",
        build=partial(
            BlockRecurrentTransformer,
            num_tokens=50,
            dim=32,
            depth=2,
            dim_head=8,
            heads=4,
            max_seq_len=16,
            block_width=8,
            num_state_vectors=4,
            recurrent_layers=(2,),
        ),
        inputs=ids,
    )


def palm() -> Iterator[Case]:
    from palm_rlhf_pytorch import PaLM

    for flash in (False, True):
        yield Case(
            name=f"PaLM{', flash' * flash}",
            build=partial(PaLM, num_tokens=50, dim=32, depth=2, heads=4, dim_head=8, flash_attn=flash),
            inputs=ids,
        )


def x_clip() -> Iterator[Case]:
    from x_clip import CLIP

    yield Case(
        name="CLIP",
        build=partial(
            CLIP,
            dim_text=32,
            dim_image=32,
            dim_latent=16,
            num_text_tokens=50,
            text_enc_depth=1,
            text_seq_len=16,
            text_heads=4,
            text_dim_head=8,
            visual_enc_depth=1,
            visual_image_size=32,
            visual_patch_size=8,
            visual_heads=4,
            visual_dim_head=8,
            visual_patch_dropout=0.0,
        ),
        inputs=lambda: (*ids(), *picture()),
    )


def titans() -> Iterator[Case]:
    from titans_pytorch import MemoryAsContextTransformer
    from titans_pytorch.mac_transformer import SegmentedAttention

    yield Case(
        name="SegmentedAttention",
        build=partial(SegmentedAttention, 32, segment_len=8, num_persist_mem_tokens=2, dim_head=8, heads=4),
        inputs=x,
    )
    yield Case(
        name="MemoryAsContextTransformer",
        build=partial(
            MemoryAsContextTransformer,
            num_tokens=50,
            dim=32,
            depth=2,
            segment_len=8,
            num_persist_mem_tokens=2,
            num_longterm_mem_tokens=2,
            dim_head=8,
            heads=4,
            neural_memory_layers=(),
        ),
        inputs=ids,
    )


def mega() -> Iterator[Case]:
    from mega_pytorch import Mega, MegaLayer

    yield Case(
        name="MegaLayer",
        build=partial(MegaLayer, dim=32, ema_heads=4, attn_dim_qk=16, attn_dim_value=32, laplacian_attn_fn=False),
        inputs=x,
    )
    yield Case(
        name="MegaLayer, Laplacian",
        build=partial(MegaLayer, dim=32, ema_heads=4, attn_dim_qk=16, attn_dim_value=32, laplacian_attn_fn=True),
        inputs=x,
    )
    yield Case(
        name="Mega",
        build=partial(
            Mega,
            num_tokens=50,
            dim=32,
            depth=2,
            ema_heads=4,
            attn_dim_qk=16,
            attn_dim_value=32,
            laplacian_attn_fn=False,
        ),
        inputs=ids,
    )


def moe() -> Iterator[Case]:
    from soft_moe_pytorch import SoftMoE
    from st_moe_pytorch import MoE, SparseMoEBlock

    class After(nn.Module):
        """A plain attention, and a mixture of experts that follows."""

        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.experts = experts

        def forward(self, x: torch.Tensor) -> object:
            out, _ = self.attention(x, x, x, need_weights=False)
            return self.experts(out)

    yield Case(
        name="attention, then SoftMoE", build=lambda: After(SoftMoE(dim=32, seq_len=16, num_experts=4)), inputs=x
    )
    yield Case(
        name="attention, then ST-MoE",
        build=lambda: After(MoE(dim=32, num_experts=4, gating_top_n=2)),
        inputs=x,
    )
    yield Case(
        name="attention, then an ST-MoE block",
        build=lambda: After(SparseMoEBlock(MoE(dim=32, num_experts=4, gating_top_n=2))),
        inputs=x,
    )


def hourglass() -> Iterator[Case]:
    from hourglass_transformer_pytorch import HourglassTransformerLM

    yield Case(
        name="HourglassTransformerLM",
        build=partial(
            HourglassTransformerLM,
            num_tokens=50,
            dim=32,
            max_seq_len=16,
            heads=4,
            dim_head=8,
            shorten_factor=2,
            depth=(1, 1, 1),
        ),
        inputs=ids,
    )


def tables() -> Iterator[Case]:
    from tab_transformer_pytorch import FTTransformer, TabTransformer

    columns = lambda: (torch.randint(0, 3, (4, 3)), torch.randn(4, 2))  # noqa: E731
    sizes = {"categories": (3, 4, 5), "num_continuous": 2, "dim": 32, "dim_out": 1, "depth": 2, "heads": 4}
    yield Case(
        name="TabTransformer", build=partial(TabTransformer, **sizes, dim_head=8, mlp_act=nn.ReLU()), inputs=columns
    )
    yield Case(name="FTTransformer", build=partial(FTTransformer, **sizes, dim_head=8), inputs=columns)


def itransformer() -> Iterator[Case]:
    from iTransformer import iTransformer, iTransformer2D

    series = lambda: (torch.randn(4, 12, 5),)  # noqa: E731
    sizes = {"num_variates": 5, "lookback_len": 12, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "pred_length": 3}
    for flash in (False, True):
        yield Case(
            name=f"iTransformer{', flash' * flash}",
            build=partial(iTransformer, **sizes, flash_attn=flash),
            inputs=series,
        )
    yield Case(
        name="iTransformer2D",
        build=partial(iTransformer2D, **sizes, num_time_tokens=4, flash_attn=False),
        inputs=series,
    )


def memorizing() -> Iterator[Case]:
    from memorizing_transformers_pytorch import MemorizingTransformer

    yield Case(
        name="MemorizingTransformer",
        build=partial(
            MemorizingTransformer,
            num_tokens=50,
            dim=32,
            dim_head=8,
            heads=4,
            depth=2,
            memorizing_layers=(9,),
            max_knn_memories=64,
            num_retrieved_memories=4,
        ),
        inputs=ids,
        call=lambda model, x: model(x, knn_memories=model.create_knn_memories(batch_size=2)),
    )


def segformer() -> Iterator[Case]:
    from segformer_pytorch import Segformer

    yield Case(
        name="Segformer",
        build=partial(
            Segformer,
            dims=(8, 16, 16, 32),
            heads=(1, 2, 2, 4),
            reduction_ratio=(8, 4, 2, 1),
            num_layers=1,
            decoder_dim=16,
            num_classes=3,
        ),
        inputs=lambda: picture(2, 64),
    )


def slots() -> Iterator[Case]:
    from slot_attention import MultiHeadSlotAttention, SlotAttention

    yield Case(name="SlotAttention", build=partial(SlotAttention, num_slots=3, dim=32, iters=2), inputs=x)
    yield Case(
        name="MultiHeadSlotAttention",
        build=partial(MultiHeadSlotAttention, num_slots=3, dim=32, heads=4, iters=2),
        inputs=x,
    )


def rotary() -> Iterator[Case]:
    from rotary_embedding_torch import RotaryEmbedding

    class Rotated(nn.Module):
        """Attention whose queries and keys the library rotates."""

        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(dim=4)
            self.project = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
            q, k = (self.rotary.rotate_queries_or_keys(y) for y in (q, k))
            return ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    yield Case(name="rotated queries and keys", build=Rotated, inputs=x)


def taylor() -> Iterator[Case]:
    from taylor_series_linear_attention import TaylorSeriesLinearAttn

    yield Case(
        name="TaylorSeriesLinearAttn",
        build=partial(TaylorSeriesLinearAttn, dim=32, dim_head=4, heads=4),
        inputs=x,
    )


def bottleneck() -> Iterator[Case]:
    from bottleneck_transformer_pytorch import BottleStack

    yield Case(
        name="BottleStack",
        build=partial(BottleStack, dim=8, fmap_size=8, dim_out=16, proj_factor=2, num_layers=2, heads=4, dim_head=8),
        inputs=lambda: (torch.randn(2, 8, 8, 8),),
    )


def halo() -> Iterator[Case]:
    from halonet_pytorch import HaloAttention

    yield Case(
        name="HaloAttention",
        build=partial(HaloAttention, dim=16, block_size=4, halo_size=2, dim_head=8, heads=4),
        inputs=lambda: (torch.randn(2, 16, 8, 8),),
    )


def lambda_networks() -> Iterator[Case]:
    from lambda_networks import LambdaLayer

    yield Case(
        name="LambdaLayer",
        build=partial(LambdaLayer, dim=16, dim_out=16, n=8, dim_k=4, heads=4, dim_u=1),
        inputs=lambda: (torch.randn(2, 16, 8, 8),),
    )


def ring() -> Iterator[Case]:
    from ring_attention_pytorch import RingAttention

    yield Case(
        name="RingAttention on one device",
        build=partial(
            RingAttention,
            dim=32,
            dim_head=8,
            heads=4,
            causal=True,
            ring_attn=False,
            striped_ring_attn=False,
            use_cuda_kernel=False,
        ),
        inputs=x,
    )


LIBRARIES = {
    "perceiver-pytorch": perceiver,
    "linformer": linformer,
    "local-attention": local_attention,
    "axial-attention": axial_attention,
    "nystrom-attention": nystrom,
    "performer-pytorch": performer,
    "reformer-pytorch": reformer,
    "routing-transformer": routing,
    "sinkhorn-transformer": sinkhorn,
    "linear-attention-transformer": linear,
    "CoLT5-attention": colt5,
    "denoising-diffusion-pytorch": denoising,
    "enformer-pytorch": enformer,
    "CoCa-pytorch": coca,
    "block-recurrent-transformer-pytorch": recurrent,
    "PaLM-rlhf-pytorch": palm,
    "x-clip": x_clip,
    "titans-pytorch": titans,
    "mega-pytorch": mega,
    "soft-moe-pytorch": moe,
    "hourglass-transformer-pytorch": hourglass,
    "tab-transformer-pytorch": tables,
    "iTransformer": itransformer,
    "memorizing-transformers-pytorch": memorizing,
    "segformer-pytorch": segformer,
    "slot-attention": slots,
    "rotary-embedding-torch": rotary,
    "taylor-series-linear-attention": taylor,
    "bottleneck-transformer-pytorch": bottleneck,
    "halonet-pytorch": halo,
    "lambda-networks": lambda_networks,
    "ring-attention-pytorch": ring,
}
