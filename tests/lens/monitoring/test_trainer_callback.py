"""The Trainer of transformers writes the history that a plain loop has on the same batches."""

import pytest
import torch

from regard.lens import HeadHistory, Monitor

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=32))


def examples():
    ids = torch.randint(0, 20, (8, 7), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder, steps, **options):
    from regard.lens.monitoring.trainer_callback import TrainerMonitor

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", save_strategy="no", eval_strategy="steps", eval_steps=1,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trained = model()
    watch = TrainerMonitor(Monitor(trained, every=1))
    trainer = transformers.Trainer(
        trained, arguments, train_dataset=examples(), eval_dataset=examples()[:2], callbacks=[watch]
    )
    trainer.train(**options)
    return watch.monitor.history


def test_the_trainer_has_the_history_of_a_plain_loop(tmp_path):
    found = train(tmp_path, 3)
    trained = model()
    optimizer, monitor = torch.optim.SGD(trained.parameters(), 0.1), Monitor(trained, every=1)
    batches = examples()
    for n in range(3):
        with monitor:
            for batch in batches[2 * n : 2 * n + 2]:
                (trained(**{name: x[None] for name, x in batch.items()}).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found.steps == [1, 2, 3]
    for name in found.measures:
        torch.testing.assert_close(found[name], monitor.history[name], atol=1e-5, rtol=1e-5)
    assert HeadHistory.load(tmp_path).steps == [1, 2, 3]
