"""HTTP servers of the tests: JSON in, JSON out."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def json_server(answer: Callable[[dict], tuple[int, dict | list]]):
    """A server, not started yet: `answer` gives status and body for each body posted; a GET lists a model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "first"}]})

        def do_POST(self):
            self.reply(*answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Retry-After-Ms", "1")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    return server


def started(server: ThreadingHTTPServer) -> ThreadingHTTPServer:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def stopped(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
