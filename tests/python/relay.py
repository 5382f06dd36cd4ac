"""A network between clients and a server that a test can cut, or leave half open."""

import socket
import threading
from contextlib import suppress
from typing import Self


class Relay:
    """Forwards every connection to `address` to `server`, both host:port."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self._frozen = threading.Event()
        self._cut = threading.Event()
        self.address = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Breaks every connection; there are no new ones."""
        self._cut.set()
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def freeze(self) -> None:
        """From now on nothing passes, and neither end is told: connections stay half open."""
        self._frozen.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._sockets[0].accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._frozen.is_set():
                    self._cut.wait()
                sink.sendall(data)
