"""The operator's side of a running daemon: AdminService, on a port of its own."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from epikv.connection import CLIENT_OPTIONS, Tls, connect, token_from_environment
from epikv.errors import RpcError
from epikv.messages import ActiveRequest, Model, ModelLoad, ServerStatus, as_json, from_proto
from epikv.options import message_of
from epikv.v1 import admin_pb2, admin_pb2_grpc, config_pb2

DEFAULT_ADMIN_SERVER = "127.0.0.1:50052"


class Admin:
    """One connection to a daemon's `admin_listen`, for any number of threads. Every call raises
    RpcError; after `close()`, ValueError.

        with Admin("127.0.0.1:50052") as admin:
            admin.load_model("new.pt", name="b", replace=True)
    """

    def __init__(
        self,
        server: str = DEFAULT_ADMIN_SERVER,
        *,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`token`, of an operator, and `tls` are as of Client."""
        token = token if token is not None else token_from_environment()
        tls = tls or Tls.from_environment()
        self._is_closed = False
        self._channel = connect(server, options=CLIENT_OPTIONS, tls=tls, token=token)
        self._service = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._is_closed = True
        self._channel.close()

    def ask(self, request: Message) -> Message:
        """The answer to a request of AdminService, both as the contract has them."""
        if self._is_closed:
            raise ValueError("the admin connection is closed")
        method = request.DESCRIPTOR.name.removesuffix("Request")
        try:
            answer: Message = getattr(self._service, method)(request)
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None
        return answer

    def status(self) -> ServerStatus:
        """What the daemon is doing, and its models."""
        return self._told(admin_pb2.GetServerStatusRequest())

    def load(self) -> list[ModelLoad]:
        """Queue, running requests, KV and speed of each model."""
        answer = self.ask(admin_pb2.GetLoadRequest())
        assert isinstance(answer, admin_pb2.GetLoadResponse)
        return [from_proto(model) for model in answer.models]

    def requests(self, model: str = "") -> list[ActiveRequest]:
        """What is live, and what it waits for; of one model or of all."""
        answer = self.ask(admin_pb2.ListActiveRequestsRequest(model=model))
        assert isinstance(answer, admin_pb2.ListActiveRequestsResponse)
        return [from_proto(request) for request in answer.requests]

    def drain(self) -> ServerStatus:
        """Refuses new requests from now on; what runs or waits goes on."""
        return self._told(admin_pb2.DrainRequest())

    def resume(self) -> ServerStatus:
        """Takes requests again."""
        return self._told(admin_pb2.ResumeRequest())

    def config(self) -> dict[str, Any]:
        """Every setting as it is now, by its name in deploy/epikvd.textproto."""
        return as_json(self.ask(admin_pb2.GetConfigRequest()))

    def update_config(
        self, settings: Mapping[str, Any], *, validate_only: bool = False
    ) -> dict[str, Any]:
        """Changes settings, all or nothing, for as long as the process lives; every setting as it
        is then. Raises ValueError for a value that no setting can hold."""
        return as_json(self.ask(update_request(settings, validate_only=validate_only)))

    def load_model(
        self,
        path: Path | str,
        *,
        name: str = "",
        artefact_dir: Path | str = "",
        draft_model: Path | str = "",
        kv_pool_bytes: int = 0,
        threads: int = 0,
        replace: bool = False,
    ) -> Model:
        """Loads a model file of the daemon's machine, and returns when it serves.

        `name`: what clients call it by, else the one in the file. 0 bytes or threads: those of the
        model that it replaces, else the daemon's.
        """
        source = message_of(
            config_pb2.ModelSource,
            path=str(path),
            name=name,
            artefact_dir=str(artefact_dir),
            draft_model=str(draft_model),
            kv_pool_bytes=kv_pool_bytes,
            threads=threads,
        )
        return self._told(admin_pb2.LoadModelRequest(source=source, replace=replace))

    def unload_model(self, name: str, *, grace: float | None = None) -> None:
        """Takes a model out of service. grace: seconds that its requests may go on; None: as long
        as they take."""
        self.ask(unload_request(name, grace))

    def flush_prefix_cache(self, model: str = "") -> None:
        """Forgets the cached prefixes of prompts; of one model or of all."""
        self.ask(admin_pb2.FlushPrefixCacheRequest(model=model))

    def dump(self) -> dict[str, Any]:
        """Status, requests, settings and metrics at once, for a bug report."""
        return as_json(self.ask(admin_pb2.DumpStateRequest()))

    def _told(self, request: Message) -> Any:
        return from_proto(self.ask(request))


def update_request(
    settings: Mapping[str, Any], *, validate_only: bool
) -> admin_pb2.UpdateConfigRequest:
    """Raises ValueError for a value that no setting can hold."""
    return admin_pb2.UpdateConfigRequest(
        config=message_of(config_pb2.ServerConfig, **settings),
        update_mask=FieldMask(paths=list(settings)),
        validate_only=validate_only,
    )


def unload_request(name: str, grace: float | None) -> admin_pb2.UnloadModelRequest:
    wait = None
    if grace is not None:
        wait = Duration()
        wait.FromTimedelta(timedelta(seconds=grace))
    return admin_pb2.UnloadModelRequest(name=name, grace=wait)
