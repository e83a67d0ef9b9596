import re
from pathlib import Path

import pytest

from app.settings import SETTINGS, Settings, flag, is_loopback, load_settings, variable
from engine.errors import ConfigError

HOME = {"HOME": "/home/somebody"}
ROOT = Path(__file__).resolve().parents[2]


def load(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, **rest: str) -> Settings:
    return load_settings(flags or {}, {**HOME, **(environ or {})}, **rest)


def test_sources_in_their_order(tmp_path: Path) -> None:
    toml = tmp_path / "ullage.toml"
    toml.write_text('max-batch = 3\nmax_queue = 4\nport = 5\nops-allowed-hosts = ["a", "b"]\nno-auth = true\n')
    settings = load({"port": "7"}, {"ULLAGE_MAX_QUEUE": "6", "ULLAGE_PORT": "6"}, config=str(toml))
    assert (settings.max_batch, settings.max_queue, settings.port) == (3, 6, 7)
    assert settings.ops_allowed_hosts == ("a", "b")
    assert settings.no_auth
    assert settings.kv_dtype == "auto"


def test_config_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    toml = tmp_path / "ullage.toml"
    toml.write_text("threads = 1\n")
    assert load(environ={"ULLAGE_CONFIG": str(toml)}).threads == 1


def test_folders_follow_the_xdg_specification() -> None:
    settings = load({"port": "9000"})
    assert settings.state_dir == "/home/somebody/.local/state/ullage/9000"
    assert settings.cache_dir == "/home/somebody/.cache/ullage"
    assert load(environ={"XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "relative"}).state_dir == "/s/ullage/8000"
    assert load(environ={"XDG_CACHE_HOME": "relative"}).cache_dir == "/home/somebody/.cache/ullage"
    assert load({"state_dir": "/mine"}).state_dir == "/mine"


def test_kubernetes_service_links_are_no_settings() -> None:
    links = {
        "ULLAGE_PORT": "tcp://10.0.0.1:8000",
        "ULLAGE_SERVICE_HOST": "10.0.0.1",
        "ULLAGE_SERVICE_PORT": "8000",
        "ULLAGE_SERVICE_PORT_HTTP": "8000",
        "ULLAGE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ULLAGE_PORT_8000_TCP_PROTO": "tcp",
        "ULLAGE_PORT_8000_TCP_PORT": "8000",
        "ULLAGE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ULLAGE_OPS_PORT": "tcp://10.0.0.2:8001",
        "ULLAGE_OPS_SERVICE_HOST": "10.0.0.2",
    }
    assert load(environ=links) == load()


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"port": "abc"}, {}, "--port: expected a whole number"),
        ({"port": "65536"}, {}, "--port: expected a whole number <= 65535"),
        ({"max_context": "1.5"}, {}, "--max-context: expected a whole number"),
        ({"max_context": ""}, {}, "--max-context: is empty"),
        ({"max_context": "null"}, {}, "--max-context: leave it out to have it chosen"),
        ({"kv_dtype": "q4"}, {}, "--kv-dtype: expected one of auto, f32, f16, int8"),
        ({"prefill_chunk": "some"}, {}, "--prefill-chunk: expected one of fixed or a whole number"),
        ({"prefill_chunk": "0"}, {}, "--prefill-chunk: expected a whole number >= 1"),
        ({"request_timeout": "nan"}, {}, "--request-timeout: expected a number > 0"),
        ({}, {"ULLAGE_NO_AUTH": "perhaps"}, "ULLAGE_NO_AUTH: expected true or false"),
        ({}, {"ULLAGE_PROT": "80"}, "ULLAGE_PROT: there is no such setting"),
        ({}, {"ULLAGE_port": "80"}, "ULLAGE_port: there is no such setting"),
        ({"device": "cuda"}, {}, "--device cuda: .* no CUDA backend"),
        ({"host": "0.0.0.0"}, {}, "--host 0.0.0.0: .*--api-key-file, or --no-auth"),
        ({"host": "example.org"}, {}, "--host example.org: "),
        ({"no_auth": True, "api_key_file": "/k"}, {}, "--no-auth: contradicts --api-key-file"),
        ({"ops_port": "8000"}, {}, "--ops-port 8000: is the public port too"),
        ({"max_body_mib": "65", "max_inflight_mib": "64"}, {}, "--max-body-mib: is over --max-inflight-mib"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(flags: dict[str, object], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(flags, environ)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "there is no setting 'prot'"),
        ("port = '80x'", "port in .*: expected a whole number"),
        ("port = true", "port in .*: expected a whole number"),
        ("max_batch = 1.5", "max_batch in .*: expected a whole number"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    toml = tmp_path / "ullage.toml"
    toml.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(config=str(toml))


def test_a_config_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--config /none\.toml: No such file"):
        load(config="/none.toml")


def test_public_address_with_keys_or_on_purpose() -> None:
    assert load({"host": "0.0.0.0", "no_auth": True}).no_auth
    assert load({"host": "0.0.0.0", "api_key_file": "/keys"}).host == "0.0.0.0"


@pytest.mark.parametrize(("host", "expected"), [("127.9.9.9", True), ("::1", True), ("localhost", True), ("::", False)])
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_engine_config() -> None:
    config = load({"prefill_chunk": "fixed", "threads": "2"}).engine_config("m.gguf")
    assert config.prefill_chunk_fixed
    assert (config.model_path, config.device, config.prefill_chunk, config.threads) == ("m.gguf", "cpu", 512, 2)
    config = load({"prefill_chunk": "8192"}).engine_config("m.gguf")
    assert (config.prefill_chunk, config.prefill_chunk_idle, config.prefill_chunk_fixed) == (8192, 8192, False)


def test_model_id() -> None:
    assert load().model_id("/a/b.Q4.gguf") == "b.Q4"
    assert load({"model_name": "mine"}).model_id("/a/b.gguf") == "mine"


def test_lines_name_every_setting_and_no_secret(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("very-secret\n")
    lines = load({"api_key_file": str(keys)}).lines()
    assert [line.split()[0] for line in lines] == [flag(name) for name in SETTINGS]
    assert "very-secret" not in "".join(lines)


def shown_default(value: object) -> str:
    if value is None or value == "":
        return ""
    if value is False:
        return "off"
    return (
        f"`{','.join(value)}`"
        if isinstance(value, tuple)
        else f"`{value:g}`"
        if isinstance(value, float)
        else f"`{value}`"
    )


def test_the_page_of_settings_is_the_settings() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = [
        f"| `{flag(info.name)}` | `{variable(info.name)}` | {shown_default(info.default)} | {info.description} |"
        for info in SETTINGS.values()
    ]
    assert re.findall(r"^\| `--.*$", page, re.MULTILINE) == rows
