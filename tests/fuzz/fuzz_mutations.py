"""Changes to files: blind ones, and ones that know the format and mend its digests afterwards."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

from fuzz_values import fresh_value, perturbed, retagged

from tl_resume._format._header import DIGEST_LENGTH, KEY, PREFIX, header_digest, new_digest

TWICE = "\ue000"  # behind a key that is to stand twice
_RAW_TOKEN = re.compile(r'"\\ue001(.*?)\\ue001"')
_ZEROS = b"0" * DIGEST_LENGTH
SEALS = ("none", "header", "all", "all")  # with the blind changes, half of the files have digests that are right


def rendered(value: Any) -> str:
    """Write JSON in which keys may stand twice and numbers may be such as Python does not write."""
    text = json.dumps(value, separators=(",", ":"))
    return _RAW_TOKEN.sub(r"\1", text).replace("\\ue000", "")


def blind(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change bytes without knowing what they are."""
    kind = rng.choice(_BLIND)
    # faults near the beginning matter more than their share of the bytes
    near = rng.choice((16, 512, len(data), len(data)))
    at = rng.randrange(max(1, min(near, len(data))))
    changed = bytearray(data)
    length = rng.choice((1, 2, 4, 8, 16, 100, 1000))
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            if changed:
                place = min(len(changed) - 1, max(0, at + rng.randrange(-3, 4)))
                changed[place] ^= 1 << rng.randrange(8)
    elif kind == "set":
        changed[at : at + 1] = bytes([rng.choice((0, 1, 0x22, 0x2C, 0x5C, 0x7B, 0x7D, 0x80, 0xFF))])
    elif kind == "truncate":
        del changed[at if rng.random() < 0.7 else max(0, len(changed) - length) :]
    elif kind == "append":
        changed += rng.randbytes(length) if rng.random() < 0.5 else bytes(length)
    elif kind == "remove":
        del changed[at : at + length]
    elif kind == "insert":
        changed[at:at] = rng.randbytes(length)
    elif kind == "zero":
        changed[at : at + length] = bytes(len(changed[at : at + length]))
    elif kind == "copy":
        source = rng.randrange(len(data) + 1)
        changed[at : at + length] = data[source : source + length]
    elif kind == "twice":
        changed += data
    elif kind == "header length":
        true = int.from_bytes(data[:8], "little")
        claimed = rng.choice(
            (0, 1, 2, true - 1, true + 1, len(data) - 8, len(data) - 7, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1)
        )
        changed[:8] = (claimed % 2**64).to_bytes(8, "little")
    else:
        changed = bytearray(
            rng.choice((b"", b"\0" * 8, b"{}", b"PK\x03\x04", b"\x80\x02}.", b"\x02" + bytes(7) + b"{}"))
        )
    return bytes(changed), kind


_BLIND = ("flip",) * 6 + (
    "set", "truncate", "truncate", "append", "remove", "insert", "zero", "copy", "twice", "header length",
    "header length", "other file",
)  # fmt: skip


def structured(rng: random.Random, data: bytes) -> tuple[bytes, str, str]:
    """Change the header of a safetensors file by its structure.

    Returns:
        The file, what was done, and which digests were mended: ``"none"``, ``"header"``, or ``"all"``.
    """
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    ours = KEY in header.get("__metadata__", {})
    meta = json.loads(header["__metadata__"][KEY]) if ours else {}
    digests = meta.get("digests")
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.2:
            body, what = _resized(rng, header, body)
        elif ours and rng.random() < 0.75:
            what = changed_slot(rng, _root(rng, meta))
        else:
            what = changed_slot(rng, header)
        done.append(what)
    seal = rng.choice(SEALS) if ours else "none"
    if seal == "all" and meta.get("digests") == digests:
        meta["digests"] = "".join(_digest(entry, body) for name, entry in header.items() if name != "__metadata__")
    return assembled(header, meta if ours else None, body, seal), "; ".join(done), seal


def assembled(header: dict[str, Any], meta: dict[str, Any] | None, body: bytes, seal: str) -> bytes:
    """Put a file together; ``seal`` says whether the header's digest is to be right."""
    if meta is not None and isinstance(header.get("__metadata__"), dict) and KEY in header["__metadata__"]:
        if seal != "none" and isinstance(meta.get("header"), str):
            meta["header"] = _ZEROS.decode()
        header["__metadata__"][KEY] = rendered(meta)
    text = rendered(header).encode()
    text += b" " * (-len(text) % 8)
    if seal != "none" and text.startswith(PREFIX):
        text = text[: len(PREFIX)] + header_digest(text).encode() + text[len(PREFIX) + DIGEST_LENGTH :]
    return len(text).to_bytes(8, "little") + text + body


def changed_json(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change a JSON file by its structure."""
    content = json.loads(data)
    done = [changed_slot(rng, content) for _ in range(rng.choice((1, 1, 2)))]
    return rendered(content).encode(), "; ".join(done)


def changed_zip(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change a member of an archive, whose checksums are right again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([*members, *(name for name in members if name.endswith("data.pkl"))])
    if rng.random() < 0.15:
        del members[name]
        what = f"without {name}"
    else:
        members[name], what = blind(rng, members[name])
        what = f"{what} in {name}"
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return written.getvalue(), what


def changed_slot(rng: random.Random, root: Any) -> str:
    """Change one place of nested dicts and lists, in place; say what was done."""
    container, key, path = _pick(rng, root)
    if container is None:
        return "nothing"
    kind = rng.choice(_SLOT_KINDS)
    _SLOT_CHANGES[kind](rng, container, key, root)
    return f"{kind} {path}"


def _pick(rng: random.Random, root: Any) -> tuple[Any, Any, str]:
    """Choose a place, each branch of a container as likely as the other, however much it holds."""
    container, key, path, node = None, None, "", root
    while isinstance(node, (dict, list)) and node and (container is None or rng.random() < 0.75):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        container, node = node, node[key]
        path += f"[{key!r:.40}]"
    return container, key, path


def _replace(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    container[key] = fresh_value(rng)


def _perturb(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    container[key] = perturbed(rng, container[key])


def _remove(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    del container[key]


def _twice(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    if isinstance(container, dict):
        container[f"{key}{TWICE}"] = copy.deepcopy(container[key]) if rng.random() < 0.5 else fresh_value(rng)
    else:
        container.insert(key, copy.deepcopy(container[key]))


def _add(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    if isinstance(container, dict):
        container[rng.choice(("", "x", "$x", "$tensor", "__metadata__", "weight", "state", "\ud800"))] = fresh_value(
            rng
        )
    else:
        container.append(fresh_value(rng))


def _rename(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    if isinstance(container, dict):
        value = container.pop(key)
        container[perturbed(rng, key) if isinstance(key, str) else key] = value
    else:
        container.reverse()


def _exchange(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    other, other_key, _ = _pick(rng, root)
    container[key] = copy.deepcopy(other[other_key])


def _retag(rng: random.Random, container: Any, key: Any, root: Any) -> None:
    container[key] = retagged(rng, container[key])


_SLOT_CHANGES: dict[str, Callable[[random.Random, Any, Any, Any], None]] = {
    "replace": _replace,
    "perturb": _perturb,
    "remove": _remove,
    "twice": _twice,
    "add": _add,
    "rename": _rename,
    "exchange": _exchange,
    "retag": _retag,
}
_SLOT_KINDS = ("replace", "replace", "replace", "perturb", "perturb", *list(_SLOT_CHANGES)[2:])


def _root(rng: random.Random, meta: dict[str, Any]) -> Any:
    where = rng.random()
    if where < 0.7 and isinstance(meta.get("state"), (dict, list)) and meta["state"]:
        return meta["state"]
    if where < 0.85 and isinstance(meta.get("views"), list) and meta["views"]:
        return meta["views"]
    return meta


def _resized(rng: random.Random, header: dict[str, Any], body: bytes) -> tuple[bytes, str]:
    """Give a tensor other bytes, and mostly a shape and offsets that fit them; the tensors behind it move."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__" and _range(entry, body)}
    if not entries:
        return body, "nothing"
    name = rng.choice(list(entries))
    begin, end = entries[name]["data_offsets"]
    width = rng.choice((0, 1, 4, 8, 16, 24, 100, end - begin, end - begin))
    content = rng.choice((bytes(width), b"\xff" * width, rng.randbytes(width)))
    for entry in entries.values():
        entry["data_offsets"] = [at + (width - (end - begin)) * (at >= end) for at in entry["data_offsets"]]
    entries[name]["data_offsets"] = [begin, begin + width]
    if width != end - begin:
        size = rng.choice((1, 2, 4, 8))
        entries[name]["dtype"] = {1: "U8", 2: "F16", 4: "F32", 8: "I64"}[size]
        entries[name]["shape"] = rng.choice(([width // size], [width // size, 1], [1, width // size, 1]))
    return body[:begin] + content + body[end:], f"{width} other bytes for {name}"


def _range(entry: Any, body: bytes) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(at) is int for at in offsets)
        and 0 <= offsets[0] <= offsets[1] <= len(body)
    )


def _digest(entry: Any, body: bytes) -> str:
    if not _range(entry, body):
        return _ZEROS.decode()
    begin, end = entry["data_offsets"]
    digest = new_digest()
    digest.update(body[begin:end])
    return str(digest.hexdigest())
