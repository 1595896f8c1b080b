"""Reads protobuf text, YAML and TOML into plain values, and remembers where each stood.

What cannot be read is noted and the reading goes on, so that one message can hold every mistake.
Types and ranges are the schema's to judge; a value of the wrong protobuf type is passed on as it is
written.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from shoal.config.schema import FIELDS, SECTIONS, shown, unknown
from shoal.errors import Mistake


@dataclass
class Document:
    """What a file says: values by section and field, their places, and mistakes of the syntax."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def place(self, name: str) -> str:
        """Where a dotted name stands: ``file:line:column: name`` where known, else ``file: name``."""
        return self.places.get(name, f"{self.source}: {name}")

    def wrong(self, place: str, value: str, expected: str) -> None:
        """Notes one mistake of the syntax."""
        self.mistakes.append(Mistake(place, value, expected))


@dataclass(frozen=True, repr=False)
class Written:
    """A value as it is written, when it is none of its field's type."""

    text: str

    def __repr__(self) -> str:
        return self.text


def read(source: str, suffix: str, text: str) -> Document:
    """Reads a text in the format that its suffix names.

    Args:
        source: the name for messages.
        suffix: with its dot; one that is unknown is a mistake of the document.
    """
    document = Document(source)
    reader = READERS.get(suffix.lower())
    if reader is None:
        document.wrong(source, shown(suffix), f"must be a file that ends in one of {', '.join(READERS)}")
    else:
        reader(document, text)
    return document


def override(document: Document, settings: Sequence[str]) -> None:
    """Applies settings such as ``cluster.sync_freq=3`` to a document; values are written as in YAML."""
    for setting in settings:
        name, equals, text = setting.partition("=")
        place = f"--set {name}"
        section, _, leaf = name.rpartition(".")
        if not equals:
            document.wrong(place, shown(setting), "must be NAME=VALUE")
        elif name in SECTIONS or name not in FIELDS:
            document.mistakes.append(unknown(name, place, text))
        else:
            target = document.values.setdefault(section, {}) if section else document.values
            if isinstance(target, dict):  # else the section itself is a mistake, and reported
                target[leaf] = _setting(text)
                document.places[name] = place


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, for which 1e-3 is a number, as everywhere but in YAML 1.1."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _setting(text: str) -> object:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return Written(text)


def _yaml(document: Document, text: str) -> None:
    try:
        node, values = yaml.compose(text, _Loader), yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{document.source}:{mark.line + 1}:{mark.column + 1}" if mark else document.source
        document.wrong(where, str(error.problem), "must be YAML")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        document.wrong(document.source, str(error).splitlines()[0], "must be YAML")
    else:
        _yaml_places(document, node, "")
        _sections(document, {} if values is None else values)


def _yaml_places(document: Document, node: yaml.Node | None, path: str) -> None:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{path}{key.value}"
        place = f"{document.source}:{key.start_mark.line + 1}:{key.start_mark.column + 1}: {name}"
        if name in document.places:
            written = shown(value.value) if isinstance(value, yaml.ScalarNode) else "…"
            document.wrong(place, written, "is given twice")
        document.places.setdefault(name, place)
        if not path:
            _yaml_places(document, value, f"{name}.")


def _toml(document: Document, text: str) -> None:
    try:
        _sections(document, tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        said = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        what, line, column = said.groups() if said else (str(error), None, None)
        at = f":{line}:{column}" if line else f":{len(text.splitlines())}" if said else ""
        document.wrong(f"{document.source}{at}", what, "must be TOML")


def _sections(document: Document, values: object) -> None:
    if isinstance(values, dict):
        document.values = values
    else:
        document.wrong(document.source, shown(values), "must be sections with fields")


def _protobuf(document: Document, text: str) -> None:
    reader = _Protobuf(document, text)
    document.values = reader.section(descriptor(), "", "")


@cache
def descriptor() -> Descriptor:
    """The protobuf description of a configuration, from the compiled ``shoal.proto``."""
    compiled = Path(__file__).with_name("shoal.pb").read_bytes()
    pool = DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool.FindMessageTypeByName("shoal.Config")


class _Syntax(Exception):
    """One statement cannot be read; the reading goes on behind it."""


class _Protobuf:
    """Walks protobuf's own tokens: its parser stops at the first mistake, and this one must not."""

    def __init__(self, document: Document, text: str) -> None:
        self.document = document
        self.tokens: Any = text_format.Tokenizer(text.split("\n"))  # Any: the stubs mistype ParseError()

    def section(self, kind: Descriptor, path: str, end: str) -> dict[str, Any]:
        """Reads fields up to the closing token, which stays; ``path`` ends in a dot, or is empty."""
        values: dict[str, Any] = {}
        while not (self.tokens.LookingAt(end) or self.tokens.AtEnd()):
            line = self._line()
            try:
                self._field(kind, path, values)
            except _Syntax:
                while self._line() == line and self.tokens.token not in ("", "}", ">"):
                    self.tokens.NextToken()
        return values

    def _field(self, kind: Descriptor, path: str, values: dict[str, Any]) -> None:
        where, leaf = self._where(), self.tokens.token
        self.tokens.NextToken()  # whatever follows, the walk has moved on
        if not leaf.isidentifier():
            raise self._syntax(where, leaf, "must be the name of a field")
        name, place = f"{path}{leaf}", f"{where}: {path}{leaf}"
        colon = self.tokens.TryConsume(":")
        if not colon and self.tokens.token not in ("{", "<"):
            raise self._syntax(self._where(), self.tokens.token, f'must be ":" or "{{" after {name}')
        known = kind.fields_by_name.get(leaf)
        value = self._value(known, place, name)
        if known is not None and known.is_repeated:
            values.setdefault(leaf, []).extend(value if isinstance(value, list) else [value])
        elif known is not None and leaf in values:
            self.document.wrong(place, shown(value), "is given twice")
        else:
            values[leaf] = value
        self.document.places.setdefault(name, place)
        _ = self.tokens.TryConsume(",") or self.tokens.TryConsume(";")

    def _value(self, known: FieldDescriptor | None, place: str, name: str) -> object:
        opening = self.tokens.token
        if opening in ("{", "<"):
            self.tokens.NextToken()
            end = "}" if opening == "{" else ">"
            block = self._block(known, name, end)
            if not self.tokens.TryConsume(end):
                self.document.wrong(place, opening, f'must be closed with "{end}"')
            return block
        if not self.tokens.TryConsume("["):
            return self._scalar(known, name)
        items: list[object] = []
        while not self.tokens.TryConsume("]"):
            if items and not self.tokens.TryConsume(","):
                raise self._syntax(self._where(), self.tokens.token, 'must be "," or "]"')
            items.append(self._scalar(known, name))
        return items

    def _block(self, known: FieldDescriptor | None, name: str, end: str) -> object:
        if known is not None and known.message_type is not None:
            return self.section(known.message_type, f"{name}.", end)
        open_blocks = 0
        while not self.tokens.AtEnd() and (open_blocks or not self.tokens.LookingAt(end)):
            open_blocks += {"{": 1, "<": 1, "}": -1, ">": -1}.get(self.tokens.token, 0)
            self.tokens.NextToken()
        return Written("{ … }")

    def _scalar(self, known: FieldDescriptor | None, name: str) -> object:
        if self.tokens.token in ("", *"{}<>[]:;,"):
            raise self._syntax(self._where(), self.tokens.token, f"must be a value for {name}")
        try:
            if known is not None and known.enum_type is not None:
                return known.enum_type.values_by_number[self.tokens.ConsumeEnum(known)].name
            if known is not None and known.message_type is None:
                return self._typed(known)
        except text_format.ParseError:
            pass
        written = Written(self.tokens.token)
        self.tokens.NextToken()
        return written

    def _typed(self, known: FieldDescriptor) -> object:
        match known.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.tokens.ConsumeBool()
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return self.tokens.ConsumeFloat()
            case FieldDescriptor.CPPTYPE_STRING:
                return self.tokens.ConsumeString()
            case _:
                return self.tokens.ConsumeInteger()

    def _syntax(self, where: str, token: str, expected: str) -> _Syntax:
        self.document.wrong(where, token or "end of file", expected)
        return _Syntax()

    def _line(self) -> int:
        return int(self.tokens.ParseError("").GetLine())

    def _where(self) -> str:
        at = self.tokens.ParseError("")
        return f"{self.document.source}:{at.GetLine()}:{at.GetColumn()}"


READERS: dict[str, Callable[[Document, str], None]] = {
    ".conf": _protobuf,
    ".prototxt": _protobuf,
    ".pbtxt": _protobuf,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": _toml,
}
