"""ZIP files with main.csv and images/, which are never unpacked."""

import functools
import pathlib
import re
import stat
import zipfile

from common.errors import UserError
from inputs.images import UNREADABLE
from inputs.rows import Locate, locate_image

MAX_UNPACKED_BYTES = 8 * 2**30  # maximum unpacked size of a ZIP
MAX_FILE_BYTES = 2**28  # maximum unpacked size of one file in a ZIP; limited because images are decoded from memory
# of names that a ZIP does not mark as UTF-8
ENCODINGS = ("utf-8", "gb18030", "big5hkscs", "cp932", "cp949", "cp866")


def open_zip(path: pathlib.Path) -> tuple[zipfile.Path, Locate]:
    """Find main.csv in the root of a ZIP or one level below; return its folder, and what finds images there.

    The ZIP is never unpacked. Links, paths that point outside the ZIP, and large files are refused.
    """
    try:
        archive = zipfile.ZipFile(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} has a file name that is not UTF-8 ({error}): rename the file, pack again") from None
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable ZIP ({error})") from None
    _check_members(path, archive)
    root = zipfile.Path(archive)
    folders = [folder for folder in (root, *root.iterdir()) if folder.name != "__MACOSX"]
    matches = [folder for folder in folders if (folder / "main.csv").is_file()]
    if len(matches) != 1:
        number = len(matches) or "no"
        raise UserError(f"{path} has {number} main.csv files: put one at its root or in a folder directly below it")
    return matches[0], functools.partial(locate_image, (matches[0], matches[0] / "images"), more=_as_cp437)


def _as_cp437(name: str) -> list[str]:
    """Return `name` as Python reads it if the ZIP does not mark it as UTF-8: as cp437, whatever encoding it is in."""
    return [name.encode(encoding, "replace").decode("cp437") for encoding in ENCODINGS]


def _check_members(path: pathlib.Path, archive: zipfile.ZipFile) -> None:
    """Raise UserError for files that are too large, links, and names that are unsafe, unusual or repeated."""
    total = sum(member.file_size for member in archive.infolist())
    if total > MAX_UNPACKED_BYTES:
        limit = MAX_UNPACKED_BYTES / 2**30
        raise UserError(f"{path} would unpack to {total / 2**30:.1f} GiB; the limit is {limit:.0f} GiB")
    for member in archive.infolist():
        name = member.filename
        if not member.flag_bits & 0x800:  # not UTF-8: a byte like a backslash may be half of a character
            name = re.sub(r"(?<=[^\0-\x7f])\\", "_", name)
        where, names = f"{path}: {name!r}", name.replace("\\", "/").split("/")
        if names[0] == "" or ".." in names or ":" in names[0]:
            raise UserError(f"{where} points outside the ZIP; leave it out")
        if "\\" in name:
            raise UserError(f"{where} has a backslash: pack the ZIP again with a program that separates names by '/'")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise UserError(f"{where} is a link; put the file itself into the ZIP")
        if member.file_size > MAX_FILE_BYTES:
            size, limit = member.file_size / 2**20, MAX_FILE_BYTES / 2**20
            raise UserError(f"{where} would unpack to {size:.0f} MiB; the limit for one file is {limit:.0f} MiB")
    if len(set(archive.namelist())) < len(archive.namelist()):
        raise UserError(f"{path} holds a file twice: pack it again")
