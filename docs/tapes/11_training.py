# A small language model that has learned in 200 steps to repeat six tokens: look for the head that copies.
import torch

from regard.lens import capture
from regard.models import Gpt, GptConfig

torch.manual_seed(0)
config = GptConfig(vocabulary=16, dim=32, depth=2, heads=2, length=12, dropout=0.0)
copier = Gpt(config)
optimizer = torch.optim.Adam(copier.parameters(), lr=1e-2)
for _ in range(200):
    half = torch.randint(0, 16, (32, 6))
    text = torch.cat([half, half], 1)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(copier(text)[:, 5:-1].flatten(0, 1), text[:, 6:].flatten()).backward()
    optimizer.step()
with capture(copier, [str(token) for token in text[0].tolist()]) as tape, torch.no_grad():
    copier(text[:1])
tape
