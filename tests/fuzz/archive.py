"""Archives: all of it inside the folder, or nothing anywhere."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
from pathlib import Path
from random import Random

from driveprune.archives import unpack
from tests.fuzz.mutations import NUMBERS, TEXTS, mutated_bytes

FILES = {"set/a.bin": b"abc" * 300, "set/deep/b.bin": b"b", "set/empty": b""}
PACK = {b"\x1f\x8b": (gzip.compress, gzip.decompress), b"BZh": (bz2.compress, bz2.decompress),
        b"\xfd7z": (lzma.compress, lzma.decompress)}  # fmt: skip


def honest(folder: Path) -> list[bytes]:
    found = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as tape:
            for name, content in {**FILES, "set/" + "long" * 40: b"x"}.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tape.addfile(info, io.BytesIO(content))
        found.append(file.getvalue())
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", kind) as archive:
            for name, content in FILES.items():
                archive.writestr(zipfile.ZipInfo(name), content, kind)
        found.append(file.getvalue())
    return [*found, *(pack(found[0]) for pack, _ in PACK.values())]


def mutated(data: bytes, chance: Random) -> bytes:
    for begin, (pack, plain) in PACK.items():
        if data.startswith(begin):
            return mutated_bytes(data, chance) if chance.random() < 0.4 else pack(mutated(plain(data), chance))
    if data.startswith(b"PK") or chance.random() < 0.3:
        return _renamed(mutated_bytes(data, chance), chance)
    return _tar(bytearray(data), chance)


def _renamed(data: bytes, chance: Random) -> bytes:
    """Another name in the directory of a zip archive, as long as the old one."""
    odd = chance.choice((b"../a.bin", b"/et/a.bin", b"C:\\a.binx", b"set/../.", b"\x1b]a.bi", b"set\0.bin"))
    return data.replace(b"set/a.bin", odd.ljust(9, b"x")) if chance.random() < 0.3 else data


def _tar(data: bytearray, chance: Random) -> bytes:
    """Another name, size, kind, link or anything else in a header of a tar archive, with its checksum right again."""
    starts = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    for at in chance.sample(starts, chance.choice((1, 1, 2))):
        match chance.randrange(6):
            case 0:
                data[at : at + 100] = chance.choice(TEXTS).encode("utf-8", "surrogatepass")[:100].ljust(100, b"\0")
            case 1:
                size = chance.choice([n for n in NUMBERS if type(n) is int]) % (1 << 80)
                data[at + 124 : at + 136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
            case 2:
                data[at + 156 : at + 157] = chance.choice(
                    (b"0", b"1", b"2", b"3", b"5", b"6", b"g", b"x", b"L", b"S")
                )
            case 3:
                data[at + 157 : at + 257] = (
                    chance.choice(TEXTS).encode("utf-8", "surrogatepass")[:100].ljust(100, b"\0")
                )
            case 4:
                data[at + 345 : at + 500] = chance.randbytes(155)
            case 5:
                data[at : at + 512] = mutated_bytes(bytes(data[at : at + 512]), chance)[:512].ljust(512, b"\0")
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def target(data: bytes, folder: Path) -> None:
    room = folder / "room"
    shutil.rmtree(room, ignore_errors=True)
    (room / "inner").mkdir(parents=True)
    (room / "inner" / "archive").write_bytes(data)
    try:
        unpack(room / "inner" / "archive", room / "inner" / "out")
    except (ValueError, OSError):
        assert _names(room) == {"inner", "inner/archive"}, "something was left behind"
        raise
    outside = {name for name in _names(room) if not name.startswith("inner/out")}
    assert outside == {"inner", "inner/archive"}, "something was written elsewhere"
    assert not any(path.is_symlink() for path in room.rglob("*"))


def _names(room: Path) -> set[str]:
    return {path.relative_to(room).as_posix() for path in room.rglob("*")}
