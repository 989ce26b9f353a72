# A decoder with attention learns to write numbers backwards, then writes one: each digit looks at the one it copies.
import torch

from regard.lens import capture
from regard.models import Seq2Seq, Seq2SeqConfig

torch.manual_seed(0)
config = Seq2SeqConfig(source_vocabulary=12, target_vocabulary=12, start=0, dim=32, hidden=32, dropout=0.0)
reverser = Seq2Seq(config)
optimizer = torch.optim.Adam(reverser.parameters(), lr=1e-2)
for _ in range(150):
    digits = torch.randint(2, 12, (64, 6))
    optimizer.zero_grad()
    reverser.loss({"source": digits, "target": digits.flip(1)}).mean.backward()
    optimizer.step()

digits = torch.randint(2, 12, (1, 6))
read = [str(digit - 2) for digit in digits[0].tolist()]
with capture(reverser.eval(), {"*": (read[::-1], read)}) as tape, torch.no_grad():
    reverser.loss({"source": digits, "target": digits.flip(1)})
tape
