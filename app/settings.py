"""The one typed settings tree, and the only reader of the environment.

Defaults < TOML (`--config`) < `ULLAGE_*` < flags. A name that does not exist, a value of the wrong kind and a value
that nothing would read are start-up errors. What a setting means is said once, here: `--help` and docs/settings.md
repeat these descriptions (a test compares them).
"""

import ipaddress
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.config import EngineConfig
from engine.errors import ConfigError

ENV_PREFIX = "ULLAGE_"
CONFIG_VARIABLE = "ULLAGE_CONFIG"
NOT_SETTINGS = {CONFIG_VARIABLE, "ULLAGE_CI"}
"""Variables of our prefix that are read elsewhere: the path of the TOML file, and the tests' own switch."""

SERVICE_LINK_NAME = re.compile(
    r"ULLAGE(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+")
"""Kubernetes puts these into every pod for a Service whose name begins with `ullage`; they are no settings."""

IDLE_PREFILL_CHUNK = 4096
"""Prompt tokens in a step while nothing decodes, unless --prefill-chunk asks for more."""


Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
PortNumber = Annotated[int, Meta(ge=0, le=65535)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of `ullage serve`. `None` means: chosen at start from the model and the machine."""

    model: Annotated[str | None, Meta(description="path of the GGUF file; else the demo model is fetched")] = None
    model_name: Annotated[str | None, Meta(description="model id for clients; else the file name without .gguf")] = None
    host: Annotated[str, Meta(description="address of the public listener")] = "127.0.0.1"
    port: Annotated[PortNumber, Meta(description="port of the public listener; 0 takes a free one")] = 8000
    ops_host: Annotated[str, Meta(description="address of the ops listener, which no proxy may expose")] = "127.0.0.1"
    ops_port: Annotated[PortNumber, Meta(description="port of the ops listener; 0 takes a free one")] = 8001
    ops_allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="host names, joined by commas, that the ops listener answers to")
    ] = ("localhost", "127.0.0.1", "::1")
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="where the model runs; auto is cpu until CUDA is built")
    ] = "auto"
    max_context: Annotated[
        Positive | None, Meta(description="tokens of prompt and answer together; else what was trained and fits")
    ] = None
    max_batch: Annotated[
        Annotated[int, Meta(ge=1, le=256)], Meta(description="sequences that run at once; further ones wait")
    ] = 64
    kv_dtype: Annotated[
        Literal["auto", "f32", "f16", "int8"], Meta(description="how keys and values are stored; auto is f32 on cpu")
    ] = "auto"
    kv_pool_mib: Annotated[
        Positive | None,
        Meta(description="MiB of keys and values; else a quarter of free memory, at most 64 x max-context"),
    ] = None
    prefill_chunk: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | Literal["fixed"],
        Meta(description="prompt tokens a step while others decode; fixed: 512, one prompt a step"),
    ] = 512
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="CPU threads of the engine; else all cores")
    ] = None
    api_key_file: Annotated[
        str | None, Meta(description="file with one API key a line; without it no key is asked for")
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="file with the key for /admin; else one is made in the state folder")
    ] = None
    no_auth: Annotated[bool, Meta(description="let the public listener leave loopback without API keys")] = False
    state_dir: Annotated[str, Meta(description="folder of this instance; else $XDG_STATE_HOME/ullage/PORT")] = ""
    cache_dir: Annotated[str, Meta(description="folder of models and kernels; else $XDG_CACHE_HOME/ullage")] = ""
    max_queue: Annotated[Positive, Meta(description="requests that may wait; beyond it 429")] = 256
    max_inflight_mib: Annotated[
        Positive, Meta(description="MiB of bodies, records and unsent output held at once; beyond it 429")
    ] = 512
    max_body_mib: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], Meta(description="MiB of one request body; beyond it 413")
    ] = 64
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=1e7)], Meta(description="seconds that one request may take, its wait included")
    ] = 3600.0
    drain_timeout: Annotated[
        Annotated[float, Meta(ge=0, le=1e7)], Meta(description="seconds that running requests get after SIGTERM")
    ] = 30.0
    sse_keepalive: Annotated[
        Literal["comment", "chunk", "off"], Meta(description="what a stream sends after 15 seconds of silence")
    ] = "comment"

    def engine_config(self, model_path: str) -> EngineConfig:
        """The part that the engine gets at its handshake."""
        chunk = 512 if isinstance(self.prefill_chunk, str) else self.prefill_chunk
        return EngineConfig(
            model_path=model_path,
            device="cpu" if self.device == "auto" else self.device,
            kv_dtype=self.kv_dtype,
            max_context=self.max_context,
            max_batch=self.max_batch,
            kv_pool_mib=self.kv_pool_mib,
            prefill_chunk=chunk,
            prefill_chunk_idle=max(chunk, IDLE_PREFILL_CHUNK),
            prefill_chunk_fixed=self.prefill_chunk == "fixed",
            threads=self.threads,
        )

    def model_id(self, model_path: str) -> str:
        return self.model_name or Path(model_path).name.removesuffix(".gguf")

    def lines(self) -> list[str]:
        """One `--flag value` a line, for people. Key files are named; keys are not in here at all."""
        return [f"{flag(name)} {_shown(getattr(self, name))}" for name in SETTINGS]


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ",".join(value) if isinstance(value, tuple) else str(value)


class SettingInfo(msgspec.Struct, frozen=True):
    """One setting as the command line and the page of settings need it."""

    name: str
    description: str
    default: Any
    annotated: Any
    kind: Any


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _describe(name: str, annotated: Any, default: Any) -> SettingInfo:
    kind, *metas = typing.get_args(annotated)  # nested Annotated is flattened: limits first, then the description
    return SettingInfo(name, metas[-1].description, default, annotated, kind)


_HINTS = typing.get_type_hints(Settings, include_extras=True)
SETTINGS: Mapping[str, SettingInfo] = {
    field.name: _describe(field.name, _HINTS[field.name], field.default) for field in msgspec.structs.fields(Settings)
}


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, config: str | None = None
) -> Settings:
    """Merge the sources and check the result.

    `flags` maps setting names to what the command line gave (text, or True for a switch). Raises ConfigError, one
    line that names the setting as the user wrote it.
    """
    values: dict[str, Any] = {}
    config = config or environ.get(CONFIG_VARIABLE)
    if config is not None:
        values |= _from_toml(config)
    values |= _from_environment(environ)
    for name, given in flags.items():
        values[name] = _convert(SETTINGS[name], given, flag(name))
    settings = Settings(**_with_folders(values, environ))
    _check(settings)
    return settings


def _from_toml(path: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    values = {}
    for key, given in table.items():
        name = key.replace("-", "_")
        if name not in SETTINGS:
            raise ConfigError(f"--config {path}: there is no setting '{key}'")
        values[name] = _convert(SETTINGS[name], given, f"{key} in {path}")
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for key, given in environ.items():
        if not key.startswith(ENV_PREFIX) or key in NOT_SETTINGS:
            continue
        if SERVICE_LINK_NAME.fullmatch(key) or SERVICE_LINK_VALUE.fullmatch(given):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        if name not in SETTINGS or key != key.upper():
            raise ConfigError(f"{key}: there is no such setting")
        values[name] = _convert(SETTINGS[name], given, key)
    return values


def _convert(info: SettingInfo, given: Any, written: str) -> Any:
    """`given` as the setting's type; text (from flags and variables) is read, TOML values must be of the type."""
    is_text = isinstance(given, str)
    if is_text and isinstance(info.default, tuple):
        given = [part.strip() for part in given.split(",") if part.strip()]
    if is_text and not given:
        raise ConfigError(f"{written}: is empty")
    try:
        value = msgspec.convert(given, type=info.annotated, strict=not is_text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{written}: {_wanted(info, str(error))}") from error
    if value is None:
        raise ConfigError(f"{written}: leave it out to have it chosen")
    return value


def _wanted(info: SettingInfo, problem: str) -> str:
    """msgspec's complaint in a user's words: `expected a whole number <= 65535`."""
    if problem.startswith("Invalid enum"):
        parts = (info.kind, *typing.get_args(info.kind))
        words = [word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]
        return f"expected one of {', '.join(words)}" + ("" if parts[1:] == tuple(words) else " or a whole number")
    problem = problem.partition(", got")[0].partition(" | null")[0].replace("`", "").replace("Expected", "expected")
    for kind, word in (("int", "a whole number"), ("float", "a number"), ("bool", "true or false")):
        problem = problem.replace(f"expected {kind}", f"expected {word}")
    return problem


def _with_folders(values: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    port = values.get("port", SETTINGS["port"].default)
    folders = {
        "state_dir": _base(environ, "XDG_STATE_HOME", ".local/state") / "ullage" / str(port),
        "cache_dir": _base(environ, "XDG_CACHE_HOME", ".cache") / "ullage",
    }
    return {name: str(folder) for name, folder in folders.items()} | values


def _base(environ: Mapping[str, str], key: str, under_home: str) -> Path:
    """The XDG base folder; a relative one is ignored, as the specification asks."""
    given = Path(environ.get(key, ""))
    return given if given.is_absolute() else Path(environ.get("HOME") or Path.home()) / under_home


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(settings: Settings) -> None:
    """Settings that contradict each other, or that nothing would read."""
    if settings.device == "cuda":
        raise ConfigError("--device cuda: this version has no CUDA backend; use --device cpu")
    if settings.no_auth and settings.api_key_file is not None:
        raise ConfigError("--no-auth: contradicts --api-key-file")
    if not is_loopback(settings.host) and settings.api_key_file is None and not settings.no_auth:
        raise ConfigError(
            f"--host {settings.host}: would serve beyond this machine without keys; "
            "give --api-key-file, or --no-auth if that is meant"
        )
    if settings.port and settings.port == settings.ops_port and settings.host == settings.ops_host:
        raise ConfigError(f"--ops-port {settings.ops_port}: is the public port too")
    if settings.max_body_mib > settings.max_inflight_mib:
        raise ConfigError("--max-body-mib: is over --max-inflight-mib, so such a body could never be taken in")


def engine_variables(settings: Settings) -> dict[str, str]:
    """What every child that runs kernels is told through its environment: where compiled ones are kept."""
    return {"NUMBA_CACHE_DIR": str(Path(settings.cache_dir) / "numba")}


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's own environment, for a child, with `added`."""
    return {**os.environ, **added}
