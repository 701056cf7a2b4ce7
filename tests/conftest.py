"""Small stock checkpoints that tests merge, made once a session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HEADS = {"two": 2, "three": 3, "five": 5}


@pytest.fixture(scope="session")
def berts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT `base` and experts `two`, `three` and `five`, named for their numbers of classes."""
    import torch

    from orthomerge.models.load import quiet

    folder = tmp_path_factory.mktemp("berts")
    with quiet():
        from transformers import BertConfig, BertForSequenceClassification, BertModel

        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 99,
            "max_position_embeddings": 40,
        }
        torch.manual_seed(0)
        base = BertModel(BertConfig(**sizes))
        base.save_pretrained(folder / "base")
        for name, classes in HEADS.items():
            torch.manual_seed(classes)
            labels = {number: f"{name}-{number}" for number in range(classes)}
            config = BertConfig(**sizes, id2label=labels, label2id={label: n for n, label in labels.items()})
            expert = BertForSequenceClassification(config)
            tuned = {
                key: value + 0.02 * torch.randn_like(value) if value.is_floating_point() else value
                for key, value in base.state_dict().items()
            }
            expert.bert.load_state_dict(tuned)
            expert.save_pretrained(folder / name)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "very", "not", "it", "was"]
    (folder / "base" / "vocab.txt").write_text("\n".join(vocabulary + [f"[unused{n}]" for n in range(86)]) + "\n")
    (folder / "base" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'
    )
    return folder
