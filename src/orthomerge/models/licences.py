"""The licence of a model, as the header of its own card gives it."""

from __future__ import annotations

from pathlib import Path

import yaml

from orthomerge.files.links import leaves

_CARD = "README.md"
_MOST = 64 << 10  # characters of a card that are looked at
_LONGEST = 100


def licence_of(path: Path, *, reference: str = "", revision: str | None = None) -> str | None:
    """What the model card in a folder says, as text; None where it says nothing, or cannot be read.

    A model of the hub is fetched without its card, which is asked for here; if there is no answer, it is unknown.
    """
    if not path.is_dir():  # a bare file: what lies beside it need not be of it
        return None
    card = path / _CARD
    if not card.is_file() and revision is not None:
        card = _fetched(reference.partition("@")[0], revision) or card
    elif leaves(card, path):
        return None
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST)
    except OSError:
        return None
    return _licence(text)


def _licence(text: str) -> str | None:
    """From the header between two lines of dashes; several licences are joined."""
    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    end = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if end is None:
        return None
    if any("*" in line or "&" in line for line in lines[1:end]):  # aliases make bombs
        return _alone(lines[1:end])
    try:
        header = yaml.safe_load("\n".join(lines[1:end]))
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError):
        return None
    return _named(header) if isinstance(header, dict) else None


def _alone(lines: list[str]) -> str | None:
    """The one line `license: NAME` of a header that is not parsed."""
    line = next((line for line in lines if line.startswith("license:")), "")
    return _short(line.partition(":")[2].strip().strip("\"'"))


def _named(header: dict[object, object]) -> str | None:
    given, name = header.get("license"), header.get("license_name")
    if given == "other" and isinstance(name, str):
        given = f"other ({name})"
    if isinstance(given, list):
        given = ", ".join(str(item) for item in given if isinstance(item, str))
    return _short(given) if isinstance(given, str) else None


def _short(text: str) -> str | None:
    shown = "".join(char for char in text if char.isprintable()).strip()[:_LONGEST]
    return shown or None


def _fetched(name: str, revision: str) -> Path | None:
    try:
        from huggingface_hub import constants, hf_hub_download

        if constants.HF_HUB_OFFLINE:
            return None
        return Path(hf_hub_download(name, _CARD, revision=revision))
    except Exception:  # noqa: BLE001 - whatever it is: a card is no reason for a merge to fail
        return None
