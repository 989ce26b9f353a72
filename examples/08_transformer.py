# --8<-- [start:code]
"""The Transformer block by block: one block written out, and the three models built from it.

Writes 08_influence.png, which inputs each output depends on, and 08_norms.png, the gradient of the last block by depth.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from regard import Causal, attend
from regard.models import Bert, BertConfig, Gpt, GptConfig, Transformer, TransformerConfig
from regard.nn import Attention, EncoderBlock, FeedForward, PostNorm, PreNorm
from regard.views.figures.canvas import WHITE_TO_DARK

torch.manual_seed(0)
b, n, dim, heads = 2, 12, 64, 4
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")

# A block: attention exchanges information between tokens, the feed-forward acts on each alone, both add to a stream.

attention, feedforward = Attention(dim, heads, mask=Causal()), FeedForward(dim, 4 * dim)
block = EncoderBlock(attention, feedforward, residual=PreNorm)
x = torch.randn(b, n, dim)
normed = block.around_attention.norm(x)  # b n dim
sides = (attention.query, attention.key, attention.value)
q, k, v = (side(normed).unflatten(-1, (heads, -1)).transpose(1, 2) for side in sides)  # b h n d
looked = attend(q, k, v, mask=Causal())  # b h n d
stream = x + attention.out(looked.transpose(1, 2).flatten(2))  # b n dim
hidden = feedforward.activation(feedforward.up(block.around_feedforward.norm(stream)))  # b n 4dim
stream = stream + feedforward.down(hidden)  # b n dim
for name, step in {"x": x, "q": q, "looked": looked, "hidden": hidden, "stream": stream}.items():
    print(f"{name:7}{' x '.join(map(str, step.shape))}")
print(f"written out and the block differ by {(stream - block(x)).abs().max():.1e}")
for part in (attention, feedforward):
    print(f"{type(part).__name__:12}{sum(p.numel() for p in part.parameters()):,} parameters")

# Three models: every token sees every token; the past alone; the past and all of another sequence.


def influence(model: nn.Module, embeddings: list[nn.Module], *ids: Tensor) -> Tensor:
    """abs(d output_i / d embedding_j), the embeddings side by side."""
    kept: list[Tensor] = []
    for one in embeddings:
        one.register_forward_hook(lambda module, args, out: kept.append(out))
    out = model(*ids)[0]
    direction = torch.randn(out.shape[-1])
    rows = [torch.autograd.grad(row @ direction, kept, retain_graph=True) for row in out]
    return torch.stack([torch.cat([part[0] for part in row]).norm(dim=-1) for row in rows])


small = {"dim": dim, "heads": heads, "hidden": 4 * dim, "dropout": 0.0, "attention_dropout": 0.0}
bert, gpt = Bert(BertConfig(vocabulary=50, depth=2, **small)), Gpt(GptConfig(vocabulary=50, depth=2, **small))
sizes = {"source_vocabulary": 50, "target_vocabulary": 50, "start": 2, "encoder_layers": 2, "decoder_layers": 2}
both = Transformer(TransformerConfig(**sizes, **small))
ids, source = torch.randint(50, (2, 1, n))
sides = [both.encoder.input.embedding, both.decoder.input.embedding]
maps = {
    "Bert: every token": influence(bert, [bert.words], ids),
    "Gpt: tokens so far": influence(gpt, [gpt.tokens], ids),
    "Transformer: all of the source | target so far": influence(both, sides, source, ids),
}
for name, map_ in maps.items():
    print(f"{name}: {(map_ > 0).float().mean():.1%} of the pairs depend on each other")

# Norms before or after: the gradient of the last block of untrained stacks, by depth, means of three draws.

depths, seeds, curves = (6, 12, 24, 48), range(3), {}
for residual in (PreNorm, PostNorm):
    curve = curves[residual.__name__] = []
    for depth in depths:
        norms = []
        for seed in seeds:
            torch.manual_seed(seed)
            x, targets = torch.randn(b, n, dim), torch.randint(50, (b * n,))
            parts = [(Attention(dim, heads), FeedForward(dim, 4 * dim)) for _ in range(depth)]
            blocks = [EncoderBlock(*part, residual=residual) for part in parts]
            head = [nn.LayerNorm(dim)] if residual is PreNorm else []
            stack = nn.Sequential(*blocks, *head, nn.Linear(dim, 50))
            nn.functional.cross_entropy(stack(x).flatten(0, 1), targets).backward()
            norms.append(blocks[-1].feedforward.down.weight.grad.norm())
        curve.append(float(torch.stack(norms).mean()))
    found = ", ".join(f"{norm:.2f}" for norm in curve)
    print(f"{residual.__name__:9} gradient of the last of 6, 12, 24, 48 blocks: {found}")
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(1, 3, figsize=(10, 3), width_ratios=[1, 1, 2])
for panel, (name, map_) in zip(panels, maps.items(), strict=True):
    panel.imshow((map_ / map_.amax(-1, keepdim=True)) ** 0.25, cmap=WHITE_TO_DARK, vmin=0, vmax=1)
    panel.set(title=name, xlabel="input", ylabel="output", xticks=[], yticks=[])
figure.savefig(folder / "08_influence.png")
figure, panel = plt.subplots(figsize=(6, 2.8))
for name, curve in curves.items():
    panel.loglog(depths, curve, marker="o", label=name)
panel.set(xlabel="blocks in the stack", ylabel="gradient of the last block")
panel.set_xticks(depths, depths)
panel.set_yticks([0.1, 0.2, 0.4, 0.8], [0.1, 0.2, 0.4, 0.8])
panel.minorticks_off()
panel.legend()
figure.savefig(folder / "08_norms.png")
# --8<-- [end:figures]
