"""Layers of the configuration: flags over environment over the runtime's text over the file.

A *document* has the form of the file: nested dictionaries with camelCase keys. Sections are merged
key by key; any other value (a rule list, ``capacityFactor``) is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from nri_numa.config.old_keys import OLD_KEYS, old_key_problems, old_value_sentence
from nri_numa.config.problems import validate_config
from nri_numa.config.sections import KUBELET_RULE_NAMES, AgentConfig, config_keys
from nri_numa.errors import ConfigError

ENVIRONMENT_PREFIX = "NRI_NUMA_"

MAX_CONFIG_BYTES = 1 << 20
"""Ordinary configurations have a few KiB; a larger file is the wrong one."""

# Environment names of the flags of ``nri-numa run``, besides those built from key paths.
_CONFIG_PATH_BY_FLAG_VARIABLE = {
    "NRI_NUMA_NRI_SOCKET": "runtime.nriSocket",
    "NRI_NUMA_PLUGIN_NAME": "runtime.pluginName",
    "NRI_NUMA_PLUGIN_INDEX": "runtime.pluginIndex",
    "NRI_NUMA_HTTP": "http.address",
}
_DOCUMENT_TYPE_KEYS = frozenset({"apiVersion", "kind"})
# Read by the command line; not part of the document.
_COMMAND_LINE_ENVIRONMENT_NAMES = frozenset(
    {"NRI_NUMA_CONFIG", "NRI_NUMA_API", "NRI_NUMA_TOKEN_FILE"}
)
# Kubernetes sets these in every pod if there is a Service nri-numa or nri-numa-controller.
_SERVICE_LINK_NAME_PATTERN = re.compile(
    r"NRI_NUMA_(?:CONTROLLER_)?(PORT|SERVICE_HOST|SERVICE_PORT)(_[A-Z0-9_]*)?"
)

Document = dict[str, Any]


@functools.cache
def config_path_by_environment_name() -> dict[str, str]:
    """Map environment names to dotted paths: ``NRI_NUMA_HTTP_ADDRESS`` to ``http.address``."""
    return {
        build_environment_name(path): path
        for path in config_keys()
        if path not in _DOCUMENT_TYPE_KEYS
    } | _CONFIG_PATH_BY_FLAG_VARIABLE


def build_environment_name(path: str) -> str:
    """Environment name of a dotted path."""
    # reservedCPUs -> reserved_cpus, podCIDR -> pod_cidr
    snake_case = re.sub(
        r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", path.replace("CPUs", "Cpus")
    )
    return ENVIRONMENT_PREFIX + snake_case.replace(".", "_").upper()


def _is_name_of(path: str, name: str) -> bool:
    """True if an environment name belongs to this key or to a key below it."""
    return f"{name}_".startswith(f"{build_environment_name(path)}_")


@dataclass(slots=True)
class LayeredDocument:
    """A document, the origins of keys that are not from the file, and its problems."""

    document: Document = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def merge_document(self, document: Mapping[str, Any], origin: str = "") -> None:
        """Merge ``document`` over the current one."""
        self.document = _merge_sections(self.document, document, AgentConfig())
        if origin:
            flat = dict(_flatten_document(document))
            self.origins.update(dict.fromkeys(flat, origin))

    def set_key(self, path: str, value: object, origin: str) -> None:
        """Set one key by its dotted path."""
        document: Any = value
        for key in reversed(path.split(".")):
            document = {key: document}
        self.merge_document(document)
        self.origins[path] = origin


def _flatten_document(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        key_path = f"{path}{key}"
        if isinstance(value, Mapping) and key_path not in config_keys():
            yield from _flatten_document(value, f"{key_path}.")
        else:
            yield key_path, value


def _merge_sections(
    base: Mapping[str, Any], overlay: Mapping[str, Any], model: msgspec.Struct
) -> Document:
    """Merge ``overlay`` over ``base``; sections are those of ``model``, null means not set."""
    kind = type(model)
    names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    merged = dict(base)
    for key, value in overlay.items():
        if value is None and key in names:
            continue
        section = getattr(model, names[key]) if key in names else None
        if isinstance(section, msgspec.Struct) and isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = _merge_sections(
                below if isinstance(below, Mapping) else {}, value, section
            )
        else:
            merged[key] = value
    return merged


def parse_config_text(text: str, source: str) -> Document:
    """Parse the document of a YAML (or JSON) text; `ConfigError` if it is no mapping."""
    if not text.strip():
        return {}
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(source, ["is larger than 1 MiB, expected a configuration file"])
    try:
        document = _parse_yaml(text)
    except ValueError as problem:
        raise ConfigError(source, [str(problem)]) from problem
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            source, [f"is a {type(document).__name__}, expected a mapping such as 'log: {{}}'"]
        )
    return document


def _parse_yaml(text: str) -> Any:
    from nri_numa import safe_yaml  # imported only if there is a text to read

    return safe_yaml.parse_yaml12(text)


def read_config_file(path: str) -> Document:
    """Read the document of a file; `ConfigError` if it cannot be read or is no mapping."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror or error}"]) from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"is not UTF-8: byte {error.start}"]) from error
    return parse_config_text(text, path)


def _add_environment(gathered: LayeredDocument, env: Mapping[str, str]) -> None:
    names = config_path_by_environment_name()
    # Short names first: the full name of a key overrides its short one.
    for name in sorted(env, key=lambda n: (n not in _CONFIG_PATH_BY_FLAG_VARIABLE, n)):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in _COMMAND_LINE_ENVIRONMENT_NAMES:
            continue
        path = names.get(name)
        if path is None:
            if old_keys := [key for key in OLD_KEYS if _is_name_of(key, name)]:
                gathered.problems.append(f"environment {name}: {OLD_KEYS[max(old_keys, key=len)]}")
                continue
            # Names unlike every key belong to other programs.
            matches = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
            if matches and not _SERVICE_LINK_NAME_PATTERN.fullmatch(name):
                gathered.problems.append(f"environment {name}: unknown, did you mean {matches[0]}?")
            continue
        text = env[name]
        value: object = text
        if path not in config_keys() or not isinstance(config_keys()[path].default, str):
            try:
                value = _parse_yaml(text)
            except ValueError as problem:
                gathered.problems.append(f"{path}: {problem} (from environment {name})")
                continue
        gathered.set_key(path, value, f"environment {name}")


def build_config(gathered: LayeredDocument, source: str) -> AgentConfig:
    """Validate a gathered document and convert it; `ConfigError` lists every problem."""
    problems, document = list(gathered.problems), _with_text_keys(gathered.document)
    try:
        config = msgspec.convert(document, AgentConfig, strict=True, str_keys=True)
    except msgspec.ValidationError:
        structural, valid_part = structural_problems(document)
        problems += structural
        if valid_part is not None:
            problems += validate_config(valid_part)
    else:
        problems += validate_config(config)
        if not problems:
            return config
    raise ConfigError(source, [_with_origin(problem, gathered.origins) for problem in problems])


def _with_origin(problem: str, origins: Mapping[str, str]) -> str:
    path = re.split(r"[:\[]", problem, maxsplit=1)[0]
    while path and path not in origins:
        path = path.rpartition(".")[0]
    origin = origins.get(path)
    return f"{problem} (from {origin})" if origin else problem


def _with_text_keys(value: Any) -> Any:
    """Convert all keys to text; YAML reads NUMA node ids as numbers."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key).lower(): _with_text_keys(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    return value


def load_config(
    path: str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    *,
    text: str = "",
) -> AgentConfig:
    """Read the configuration: flags over environment over ``text`` over file over defaults.

    Flags are values by dotted path (None: not given); ``text`` is from the Configure request.
    `ConfigError` lists every problem.
    """
    gathered = LayeredDocument()
    if path:
        gathered.merge_document(read_config_file(path))
    if text:
        source = "the runtime's Configure text"
        gathered.merge_document(parse_config_text(text, source), source)
    _add_environment(gathered, env or {})
    for key, value in (flags or {}).items():
        if value is not None:
            gathered.set_key(key, value, "command line")
    return build_config(gathered, path or "configuration")


def effective_document(config: AgentConfig) -> Document:
    """Convert a configuration to a document, defaults included."""
    document: Document = msgspec.json.decode(msgspec.json.encode(config))  # lists, no tuples
    return document


def changed_paths(
    prior: AgentConfig, config: AgentConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return changed paths: those a reload applies, and those that need a restart."""
    changed = [k for k in config_keys().values() if k.value_in(prior) != k.value_in(config)]
    live = tuple(key.path for key in changed if not key.restart)
    return live, tuple(key.path for key in changed if key.restart)


def merge_reloadable(prior: AgentConfig, config: AgentConfig) -> AgentConfig:
    """Return ``config`` with the ``prior`` values of keys that need a restart."""
    gathered = LayeredDocument(document=effective_document(config))
    prior_values = dict(_flatten_document(effective_document(prior)))
    for leaf in config_keys().values():
        if leaf.restart:
            gathered.set_key(leaf.path, prior_values[leaf.path], "")
    return msgspec.convert(gathered.document, AgentConfig, strict=True, str_keys=True)


# --- JSON Schema and structural errors ---


@functools.cache
def config_json_schema() -> dict[str, Any]:
    """Build the JSON Schema (2020-12) of the configuration file."""
    schema = msgspec.json.schema(AgentConfig)
    definitions = schema["$defs"]
    for definition in definitions.values():
        # msgspec copies class docstrings, which are for developers.
        if "properties" in definition:
            definition.pop("description", None)
        elif text := definition.get("description"):
            definition["description"] = " ".join(text.split())  # Python 3.13 strips the indentation
    for name in ("capacityFactor", "reservedMemory"):
        # Keys of JSON are texts; msgspec does not restrict them.
        definitions["AgentConfig"]["properties"][name]["propertyNames"] = {
            "pattern": "^[0-9]{1,4}$"
        }
    definitions["KubeletCompatibilitySection"]["properties"]["except"]["propertyNames"] = {
        "enum": list(KUBELET_RULE_NAMES)
    }
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:nri-numa:v1:AgentConfig",
        "title": "nri-numa AgentConfig",
    }
    # As in the written file: lists, no tuples.
    document: dict[str, Any] = json.loads(json.dumps({**head, **schema}))
    return document


def structural_problems(document: Mapping[str, Any]) -> tuple[list[str], AgentConfig | None]:
    """Return every structural error, and the configuration without the invalid keys if possible."""
    # Imported here because structural errors are rare.
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(config_json_schema())
    problems: list[str] = []
    valid_document = copy.deepcopy(dict(document))
    errors = sorted(
        validator.iter_errors(document), key=lambda e: [str(p) for p in e.absolute_path]
    )
    for error in errors:
        path = list(error.absolute_path)
        for key_path, message in _schema_error_problems(error):
            problems.append(f"{dotted_path(key_path)}: {message}")
            _remove_key(valid_document, key_path[: len(path) + 1])
    try:
        config = msgspec.convert(valid_document, AgentConfig, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        config = None
        if not problems:  # the two must not disagree, but an operator needs a reason in any case
            message, _, error_path = str(error).partition(" - at `$.")
            problems.append(f"{error_path.rstrip('`') or 'document'}: {message}")
    return problems, config


def dotted_path(path: list[Any]) -> str:
    """Format the path of a schema error: ``rules[0].set.policy``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "document"


def _schema_error_problems(error: Any) -> Iterator[tuple[list[Any], str]]:
    """Yield path and problem of each key that a schema error is about."""
    path = list(error.absolute_path)
    value, rule = error.instance, error.validator
    value_text = _value_text(value)
    if rule == "additionalProperties" and isinstance(error.schema.get("properties"), dict):
        properties = error.schema["properties"]
        for key in (key for key in value if key not in properties):
            key_path = [*path, key]
            if old_problems := list(old_key_problems(key_path, value[key])):
                yield from old_problems
                continue
            matches = (
                [name for name in properties if name.lower() == key.lower()]
                or difflib.get_close_matches(key, properties, n=1, cutoff=0.6)
                or [leaf for leaf in config_keys() if key.lower() in _misplaced_key_spellings(leaf)]
            )
            hint = (
                f", did you mean {' or '.join(matches[:3])}?"
                if matches
                else f", expected one of {', '.join(properties)}"
            )
            yield key_path, f"unknown key{hint}"
    elif rule == "pattern" and "propertyNames" in error.absolute_schema_path:
        yield [*path, value], "expected the number of a NUMA node as key"
    elif sentence := old_value_sentence(path, value):
        yield path, f"{value_text} {sentence}"
    elif rule in ("enum", "const"):
        allowed = error.validator_value if rule == "enum" else [error.validator_value]
        matches = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
        hint = f"; did you mean {matches[0]}?" if matches and len(allowed) > 1 else ""
        yield path, f"{value_text}, expected {_choices_text(allowed)}{hint}"
    elif rule == "type":
        type_text = _JSON_TYPE_TEXTS.get(error.validator_value, error.validator_value)
        yield path, f"{value_text}, expected {type_text}"
    elif rule == "anyOf":
        types = [
            _JSON_TYPE_TEXTS.get(item.get("type", ""), "a value") for item in error.validator_value
        ]
        yield path, f"{value_text}, expected {' or '.join(types)}"
    elif rule in _BOUND_TEXTS:
        yield path, f"{value_text}, expected {_BOUND_TEXTS[rule]} {error.validator_value}"
    elif rule == "minLength":
        yield path, "is empty, expected a text"
    elif rule == "pattern":
        yield path, f"{value_text}, expected a text without slash and white space"
    else:
        yield path, str(error.message)


def _misplaced_key_spellings(path: str) -> tuple[str, str]:
    """Misplaced spellings of a key: ``logLevel`` and ``level`` for ``log.level``."""
    return path.replace(".", "").lower(), path.rpartition(".")[2].lower()


_BOUND_TEXTS = {"exclusiveMinimum": "more than", "minimum": "at least", "maximum": "at most"}
_JSON_TYPE_TEXTS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "nothing",
}


def _value_text(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else json.dumps(value)[:80]


def _choices_text(allowed: list[Any]) -> str:
    *texts, last_text = [str(item) for item in allowed]
    return f"{', '.join(texts)} or {last_text}" if texts else last_text


def _remove_key(document: Any, path: list[Any]) -> None:
    """Remove an invalid key; an invalid list item removes its list, so no index shifts."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    with contextlib.suppress(LookupError, TypeError):  # an earlier error removed it
        del functools.reduce(operator.getitem, path[:-1], document)[path[-1]]
