"""BERT-base-sized models to merge, the same every time: a base and three experts, twice.

    python benchmarks/experts.py

`runs/bench/ours`: a base without a head, and experts with heads of 2, 3 and 5 classes. `runs/bench/mergekit`: the same
encoders under heads of 2 classes each, the base's too, because mergekit merges nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT

if TYPE_CHECKING:
    import torch


FOLDER = ROOT / "runs" / "bench"
CLASSES = {"a": 2, "b": 3, "c": 5}
_STAMP = "experts-1"  # to be raised when what is made here changes


def make_experts() -> None:
    """Make what is not there yet."""
    stamp = FOLDER / _STAMP
    if stamp.exists():
        return
    import torch
    from transformers import BertConfig, BertModel
    from transformers.utils.logging import disable_progress_bar

    print(f"making models of BERT-base's size in {FOLDER}", flush=True)
    disable_progress_bar()
    torch.manual_seed(0)
    encoder = {name: tensor.clone() for name, tensor in BertModel(BertConfig()).state_dict().items()}
    _save(FOLDER / "ours" / "base", encoder, None)
    _save(FOLDER / "mergekit" / "base", encoder, 2)
    for seed, (expert, classes) in enumerate(CLASSES.items(), 1):
        generator = torch.Generator().manual_seed(seed)
        # As far as fine-tuning moves weights: a tenth of their own size.
        tuned = {
            name: tensor + 0.002 * torch.randn(tensor.shape, generator=generator) for name, tensor in encoder.items()
        }
        _save(FOLDER / "ours" / expert, tuned, classes)
        _save(FOLDER / "mergekit" / expert, tuned, 2)
    stamp.touch()


def _save(folder: Path, encoder: Mapping[str, torch.Tensor], classes: int | None) -> None:
    """An ordinary transformers folder with a tokenizer; without `classes`, the encoder alone."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    if classes is None:
        model: Any = BertModel(BertConfig())
        model.load_state_dict(encoder)
    else:
        import torch

        torch.manual_seed(classes)
        labels = {number: f"class {number}" for number in range(classes)}
        model = BertForSequenceClassification(BertConfig(id2label=labels, label2id={v: k for k, v in labels.items()}))
        model.bert.load_state_dict(encoder)
    model.save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    """A vocabulary of BERT's size; both tools copy the files."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from transformers import PreTrainedTokenizerFast

    special = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    words = [*special.values(), *(f"word{number}" for number in range(30522 - len(special)))]
    vocabulary = Tokenizer(WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokens = {f"{name}_token": token for name, token in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, **tokens).save_pretrained(folder)


if __name__ == "__main__":
    make_experts()
