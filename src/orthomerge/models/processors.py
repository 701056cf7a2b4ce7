"""The tokenizer or image processor of a model: files that are copied along, and what they make of inputs.

transformers reads a copy of these files in a folder of our own, in which nothing else lies; the bytes that are copied
are those that were checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError
from orthomerge.files.documents import parse_json
from orthomerge.files.hashing import is_digest_of
from orthomerge.files.links import contained
from orthomerge.files.paths import RawFile

if TYPE_CHECKING:
    from orthomerge.models.processing import Processor


# Files beside the weights that the encoder is of no use without.
COMPANIONS = (
    "added_tokens.json", "bpe.codes", "feature_extractor_config.json", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "spm.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
DEFAULT_LENGTH = 128  # tokens per text where a head does not say
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class ProcessorSource:
    """`folder`: where `files` are. `live`: an object in memory instead. `config`: of the encoder. `hashes`: of the
    files, where a manifest says them.
    """

    modality: str
    config: Mapping[str, Any]
    folder: Path | None = None
    files: tuple[str, ...] = ()
    live: Any = None
    hashes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, folders: Iterable[Path], modality: str, config: Mapping[str, Any], *, live: Any = None
    ) -> ProcessorSource:
        """The files of the first folder that has any."""
        for folder in folders:
            names = tuple(path.name for path in companions(folder))
            if names:
                return cls(modality, config, folder, names)
        return cls(modality, config, live=live)

    @cached_property
    def _loaded(self) -> dict[int, Processor]:
        return {}

    def processor(self, max_length: int | None = None) -> Processor:
        """What makes batches of inputs; texts have at most so many tokens."""
        from orthomerge.models.processing import live_processor, load_processor

        if self.modality not in ("text", "image"):
            raise CheckpointError("a module of your own has no processor that is known here; process inputs yourself")
        length = max_length or DEFAULT_LENGTH
        if length not in self._loaded:
            modality: Any = self.modality
            if self.live is not None:
                self._loaded[length] = live_processor(self.live, self.config, modality=modality, max_length=length)
            else:
                with TemporaryDirectory(prefix="orthomerge-") as place:
                    self.write(Path(place))
                    folder = Path(place) if self.folder is not None else None
                    self._loaded[length] = load_processor(
                        folder, modality=modality, max_length=length, config=self.config, where=self.folder
                    )
        return self._loaded[length]

    def write(self, folder: Path) -> list[str]:
        """Copy the files into a folder; their names."""
        if self.live is not None:
            before = {path.name for path in folder.iterdir()}
            self.live.save_pretrained(folder)
            return sorted({path.name for path in folder.iterdir() if path.is_file()} - before)
        if self.folder is None:
            return []
        for name in self.files:
            (folder / name).write_bytes(_content(self.folder / name, self.folder, self.hashes.get(name)))
        return list(self.files)


def companions(folder: Path | None) -> list[Path]:
    """Tokenizer and processor files of a folder; a link must not bring along what lies outside of it."""
    if folder is None or not folder.is_dir():
        return []
    paths = [folder / name for name in COMPANIONS]
    return [_checked(path, folder) for path in paths if path.is_file() or path.is_symlink()]


def _content(path: Path, folder: Path, expected: str | None) -> bytes:
    """The bytes of a companion, which must be those that were written and must not ask for code of their own."""
    file = RawFile(_checked(path, folder))
    data = file.bytes(0, file.size)
    if expected is not None and not is_digest_of(data, expected):
        raise CheckpointError(f"{path} has changed since it was written; fetch the folder again, or merge again")
    if path.name.endswith("_config.json") and (asked := parse_json(data, str(path)).get("auto_map")):
        raise CheckpointError(
            f"{path} asks to run code that came with it ('auto_map': {asked!r:.80}), which is never done; if the stock "
            "class does the same, take 'auto_map' out of the file, else copy the files of one from the base"
        )
    return data


def _checked(path: Path, folder: Path) -> Path:
    contained(path, folder)
    if not path.is_file():
        raise CheckpointError(f"{path} is a link to nothing; fetch the file again, or remove the link")
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise CheckpointError(
            f"{path} is {size} bytes long; more than {_MOST_BYTES} is not believable for a file of a tokenizer or "
            "processor: fetch it again, or remove it"
        )
    return path
