import hashlib
import io
import os
import random
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from driveprune.archives import fetch, find, md5, unpack

CONTENT = bytes(range(256)) * 400
MD5, SHA256 = (hashlib.new(name, CONTENT).hexdigest() for name in ("md5", "sha256"))


# Downloads, from a server of our own.


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        type(self).asked += 1
        if "absent" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2] if "broken" in self.path else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("known", [MD5, SHA256])
def test_a_download_arrives_once(server, tmp_path, known):
    before = Handler.asked
    path = fetch(f"{server}/data.bin?x=1", known, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "data.bin"
    assert path.read_bytes() == CONTENT
    assert fetch(f"{server}/data.bin", known, path.parent) == path
    assert Handler.asked == before + 1
    assert os.listdir(path.parent) == ["data.bin"]


def test_a_wrong_file_does_not_stay(server, tmp_path):
    with pytest.raises(ValueError, match=r"^what came from http://.*/data.bin has a wrong checksum.*by hand into"):
        fetch(f"{server}/data.bin", "0" * 32, tmp_path)
    assert os.listdir(tmp_path) == []


def test_half_a_file_does_not_stay(server, tmp_path):
    with pytest.raises(
        OSError, match=r"^cannot download http://.*/broken.bin \(the connection broke\).*by hand into"
    ):
        fetch(f"{server}/broken.bin", MD5, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_wrong_file_that_was_there_is_replaced_only_by_a_right_one(server, tmp_path):
    (tmp_path / "broken.bin").write_bytes(b"old")
    with pytest.raises(OSError, match="the connection broke"):
        fetch(f"{server}/broken.bin", MD5, tmp_path)
    assert (tmp_path / "broken.bin").read_bytes() == b"old"
    (tmp_path / "data.bin").write_bytes(CONTENT[:100])
    assert fetch(f"{server}/data.bin", MD5, tmp_path).read_bytes() == CONTENT


def test_absent_files_and_servers_are_one_clear_line(server, tmp_path):
    with pytest.raises(OSError, match=r"^cannot download .*absent.bin \(404.*by hand into") as error:
        fetch(f"{server}/absent.bin", MD5, tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(OSError, match=r"^cannot download .* \(no connection\): .*by hand into"):
        fetch("http://127.0.0.1:9/data.bin", MD5, tmp_path)
    assert os.listdir(tmp_path) == []


# Unpacking.

FILES = {"set/a.bin": b"a" * 3000, "set/deep/er/b.bin": b"b", "set/empty": b""}


def write_tar(path, files, mode):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o4000
            archive.addfile(info, io.BytesIO(content))


def write_zip(path, files, mode=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", mode) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def content_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.xz", "tar.bz2", "zip"])
def test_every_kind_of_archive_is_unpacked(tmp_path, kind):
    archive = tmp_path / f"x.{kind}"
    write_zip(archive, FILES) if kind == "zip" else write_tar(archive, FILES, f"w:{kind[4:]}")
    folder = unpack(archive, tmp_path / "target")
    assert content_of(folder) == {name.removeprefix("set/"): content for name, content in FILES.items()}
    assert sorted(os.listdir(tmp_path)) == ["target", archive.name]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert os.access(folder / "a.bin", os.R_OK)


def test_an_archive_of_several_things_is_put_into_the_folder(tmp_path):
    write_zip(tmp_path / "x.zip", {"one/a": b"1", "two": b"2"})
    assert content_of(unpack(tmp_path / "x.zip", tmp_path / "target")) == {"one/a": b"1", "two": b"2"}


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "target").mkdir()
    write_zip(tmp_path / "x.zip", FILES)
    assert content_of(unpack(tmp_path / "x.zip", tmp_path / "target")) == {}


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


MALICIOUS = {
    "absolute": ([tarfile.TarInfo("/tmp/driveprune-evil")], "'/tmp/driveprune-evil' lies outside"),
    "parent": ([tarfile.TarInfo("../evil")], "'../evil' lies outside"),
    "hidden parent": ([tarfile.TarInfo("set/../../evil")], "'set/../../evil' lies outside"),
    "drive": ([tarfile.TarInfo("C:/evil")], "'C:/evil' lies outside"),
    "backslash": ([tarfile.TarInfo("..\\evil")], "lies outside"),
    "symlink and a write through it": ([link("door", ".."), tarfile.TarInfo("door/evil")], "'door' is a link"),
    "symlink inside": ([link("set/door", "a.bin")], "'set/door' is a link"),
    "hard link": ([link("set/door", "../../secret", tarfile.LNKTYPE)], "'set/door' is a link"),
    "device": ([link("set/null", "", tarfile.CHRTYPE)], "'set/null' is a device"),
    "pipe": ([link("set/pipe", "", tarfile.FIFOTYPE)], "'set/pipe' is a device"),
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_malicious_tars_write_nothing(tmp_path, case):
    members, message = MALICIOUS[case]
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "data").mkdir()
    archive = tmp_path / "data" / "x.tar"
    with tarfile.open(archive, "w") as tape:
        tape.addfile(tarfile.TarInfo("set/first"))
        for member in members:
            tape.addfile(member)
    with pytest.raises(ValueError, match="cannot be unpacked: its member") as error:
        unpack(archive, tmp_path / "data" / "set")
    assert message in str(error.value)
    assert os.listdir(tmp_path / "data") == ["x.tar"]
    assert sorted(os.listdir(tmp_path)) == ["data", "secret"]


@pytest.mark.parametrize("name", ["../evil", "/tmp/driveprune-evil", "a/../../evil", "..\\evil", "C:\\evil"])
def test_malicious_zips_write_nothing(tmp_path, name):
    (tmp_path / "data").mkdir()
    archive = tmp_path / "data" / "x.zip"
    write_zip(archive, {"set/first": b"1", name: b"evil"})
    with pytest.raises(ValueError, match="lies outside its folder"):
        unpack(archive, tmp_path / "data" / "set")
    assert os.listdir(tmp_path / "data") == ["x.zip"]
    assert os.listdir(tmp_path) == ["data"]


def test_links_in_zips_are_refused(tmp_path):
    info = zipfile.ZipInfo("door")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, "..")
    with pytest.raises(ValueError, match="'door' is a link"):
        unpack(tmp_path / "x.zip", tmp_path / "set")


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.xz", "tar.bz2", "zip"])
def test_damaged_archives_leave_nothing(tmp_path, kind):
    archive = tmp_path / f"x.{kind}"
    noise = random.Random(0)
    files = {"set/a": noise.randbytes(20_000), "set/b": noise.randbytes(20_000)}
    write_zip(archive, files) if kind == "zip" else write_tar(archive, files, f"w:{kind[4:]}")
    whole = archive.read_bytes()
    for damaged in (whole[:15_000], b"", b"no archive", whole[:9000] + bytes(500) + whole[9500:]):
        if kind == "tar" and len(damaged) == len(whole):
            continue  # a plain tar has no checksum over its content
        archive.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"x.{kind} is damaged"):
            unpack(archive, tmp_path / "set")
        assert os.listdir(tmp_path) == [archive.name]


KILLED = """
import shutil, sys
from pathlib import Path
from driveprune import archives

def slow(source, target, length):
    target.write(source.read(10))
    target.flush()
    print("half", flush=True)
    sys.stdin.read()

shutil.copyfileobj = slow
archives.unpack(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_unpack_does_not_matter(tmp_path):
    write_zip(tmp_path / "x.zip", FILES)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "x.zip"), str(tmp_path / "set")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    left = [name for name in os.listdir(tmp_path) if name != "x.zip"]
    assert len(left) == 1
    assert left[0].endswith(".part")
    assert not (tmp_path / "set").exists()
    folder = unpack(tmp_path / "x.zip", tmp_path / "set")
    assert content_of(folder) == {name.removeprefix("set/"): content for name, content in FILES.items()}


def test_another_process_may_be_faster(tmp_path, monkeypatch):
    write_zip(tmp_path / "x.zip", FILES)
    mkdtemp = tempfile.mkdtemp

    def meanwhile(**options):
        temporary = mkdtemp(**options)
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "theirs").touch()
        return temporary

    monkeypatch.setattr(tempfile, "mkdtemp", meanwhile)
    assert content_of(unpack(tmp_path / "x.zip", tmp_path / "set")) == {"theirs": b""}
    assert sorted(os.listdir(tmp_path)) == ["set", "x.zip"]


def test_a_folder_that_cannot_be_written_to_is_a_clear_error(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    write_zip(tmp_path / "x.zip", FILES)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(
        OSError, match=r"cannot unpack .*x.zip: .* cannot be written to \(Permission denied\); unpack"
    ):
        unpack(tmp_path / "x.zip", tmp_path / "set")


# Finding and checking.


def test_named_folders_come_before_the_folder_itself(tmp_path):
    assert find(tmp_path, ["a", "b"], ["x", "y"]) is None
    (tmp_path / "y").touch()
    assert find(tmp_path, ["a", "b"], ["x", "y"]) == tmp_path
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    assert find(tmp_path, ["a", "b"], ["x", "y"]) == tmp_path / "b"


def test_checksums(tmp_path):
    (tmp_path / "x").write_bytes(CONTENT)
    assert md5(tmp_path / "x") == MD5


# Archives that are much more than they seem.


def bomb(kind, size=200_000_000):
    """A few kilobytes that unpack to 200 MB: in one member, in a name, as holes, or as many empty files."""
    if kind == "zip":
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x", "w") as member:
            for _ in range(size >> 20):
                member.write(bytes(1 << 20))
        return file.getvalue()
    info = tarfile.TarInfo("x")
    info.size, many = size, b""
    if kind == "name":
        info.type = tarfile.GNUTYPE_LONGNAME
    elif kind == "header":
        info.type = tarfile.XHDTYPE
    elif kind == "files":
        info.size, many = 0, tarfile.TarInfo("y").tobuf() * (size // 512)
    pack = zlib.compressobj(9, wbits=31)
    data = pack.compress(info.tobuf() + many)
    for _ in range(info.size >> 20):
        data += pack.compress(bytes(1 << 20))
    return data + pack.flush()


@pytest.mark.parametrize("kind", ["zip", "member", "name", "header", "files"])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, kind):
    path = tmp_path / "bomb"
    path.write_bytes(bomb(kind))
    assert path.stat().st_size < 1_200_000
    with pytest.raises(ValueError, match="it would unpack to far more than an archive of its size holds|is damaged"):
        unpack(path, tmp_path / "set")
    assert os.listdir(tmp_path) == ["bomb"]


def test_holes_of_a_sparse_member_are_counted(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398] = b"00000000000\0"  # the first piece: from 0, 512 bytes
    header[398:410] = b"00000001000\0"
    header[483:495] = b"17777777777\0"  # the real size: 2 GB
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header[:512]):06o}\0 ".encode()
    (tmp_path / "bomb").write_bytes(bytes(header) + bytes(512 * 3))
    with pytest.raises(ValueError, match="it would unpack to far more"):
        unpack(tmp_path / "bomb", tmp_path / "set")
    assert os.listdir(tmp_path) == ["bomb"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_an_archive_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "x.zip")
    with pytest.raises(ValueError, match=r"x\.zip is no regular file"):
        unpack(tmp_path / "x.zip", tmp_path / "set")
