"""A client of epikvd that knows its address and nothing else: every type comes by reflection.

    python reflection.py ADDRESS REQUEST BAD_REQUEST

Streams the completion of one GenerateRequest and shows how another one fails; both as JSON, in the
protos' names. Prints what it got as one line of JSON.
"""

import json
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


def main(address: str, request: str, bad_request: str) -> None:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "epikv.v1.GenerationService" in database.get_services()
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("epikv.v1.GenerationService").methods_by_name["Generate"]
        asked, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        generate = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=asked.SerializeToString,
            response_deserializer=answer.FromString,
        )
        stream = generate(ParseDict(json.loads(request), asked()), timeout=60)
        events = [as_dict(message) for message in stream]
        try:
            list(generate(ParseDict(json.loads(bad_request), asked()), timeout=60))
            sys.exit("the bad request was taken")
        except grpc.RpcError as error:
            refused = error
        print(
            json.dumps(
                {
                    "events": events,
                    "error": {
                        "code": refused.code().name,
                        "message": refused.details(),
                        "details": details(pool, refused),
                    },
                }
            )
        )


def details(pool: DescriptorPool, error: grpc.RpcError) -> list[dict]:
    """google.rpc.Status and its details, as epikv.v1 has them."""

    def decode(name: str, data: bytes) -> object:
        found = pool.FindMessageTypeByName(f"epikv.v1.{name}")
        return GetMessageClass(found).FromString(data)

    [data] = [v for key, v in error.trailing_metadata() if key == "grpc-status-details-bin"]
    found = []
    for detail in decode("Status", data).details:
        name = detail.type_url.removeprefix("type.googleapis.com/google.rpc.")
        found.append({"type": name, **as_dict(decode(name, detail.value))})
    return found


def as_dict(message: object) -> dict:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


main(*sys.argv[1:])
