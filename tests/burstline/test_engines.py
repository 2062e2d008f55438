import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from burstline import cli
from burstline.servers.engines.transformers_serve import PYTHON_VARIABLE
from burstline.servers.registry import ENGINES
from burstline.verbs import engines
from burstline.verbs.engines import rows, table


def test_every_engine_is_listed_with_how_to_get_those_that_are_not_here():
    there = ENGINES["vllm"], "0.32.0", ["http://127.0.0.1:8000"]
    gone = ENGINES["tgi"], "no", []
    running = ENGINES["sglang"], "no", ["http://127.0.0.1:30000"]
    lines = table([there, gone, running])
    assert lines[0].split() == ["engine", "installed", "answers", "at", "container", "image"]
    assert lines[1].split() == ["vllm", "0.32.0", "http://127.0.0.1:8000", ENGINES["vllm"].image.name]
    assert lines[-2:] == ["Not installed; how to get them:", f"  tgi: {ENGINES['tgi'].how_to_get}"]
    assert table([there])[-1].startswith("vllm")


def test_an_engine_that_answers_is_found_by_its_own_words():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"data":[{"id":"m","owned_by":"sglang"}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        port = server.server_address[1]
        found = {engine.name: told for engine, *told in rows([port])}
        server.shutdown()
    assert set(found) == set(ENGINES)
    assert found["sglang"][1] == [f"http://127.0.0.1:{port}"]
    assert found["vllm"][1] == []
    assert found["reference"][0] == "yes"
    assert found["openai"][0] == "-"


def test_a_named_interpreter_that_does_not_run_is_said_and_breaks_nothing(monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, "/no/python")
    broken = {engine.name: installed for engine, installed, _ in rows([])}["transformers"]
    assert broken.startswith("broken (/no/python does not run as a Python interpreter")


def test_ports_that_are_no_numbers_are_the_users_slip(capsys):
    assert cli.main(["engines", "--ports", "8000,http"]) == 2
    assert "--ports 8000,http" in capsys.readouterr().err
    assert cli.main(["engines", "--ports", "8000,99999"]) == 2
    assert "there is no port 99999; expected 1 to 65535" in capsys.readouterr().err


def test_the_command_prints_them_all(capsys, monkeypatch):
    monkeypatch.setattr(engines, "engine_at", lambda get: None)
    assert cli.main(["engines"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ENGINES)
    assert sys.executable not in said
