#include "server/packets/packet_service.h"

#include <google/protobuf/util/time_util.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"

namespace epikv {

v1::Packet ToProto(const PacketStore::Facts& facts) {
  v1::Packet proto;
  proto.set_id(facts.id);
  proto.set_model(facts.model);
  proto.set_tenant(facts.tenant);
  proto.set_tokens(facts.tokens);
  proto.set_kept_tokens(facts.kept_tokens);
  proto.set_soft_tokens(facts.soft_tokens);
  proto.set_bytes(facts.bytes);
  *proto.mutable_create_time() =
      google::protobuf::util::TimeUtil::NanosecondsToTimestamp(absl::ToUnixNanos(facts.created));
  return proto;
}

std::optional<grpc::Status> SettleTenant(const Identity& caller, absl::string_view field,
                                         std::string& tenant) {
  if (caller.name.empty() || tenant == caller.name) return std::nullopt;
  if (tenant.empty()) {
    tenant = caller.name;
    return std::nullopt;
  }
  if (caller.May(Role::kOperator)) return std::nullopt;
  return PermissionDenied(absl::StrCat(field, " '", tenant, "' of caller '", caller.name, "'"),
                          RoleName(Role::kOperator));
}

grpc::Status PacketsOff() {
  return ToGrpc(Rejection{.code = absl::StatusCode::kFailedPrecondition,
                          .reason = std::string(kPacketsOff),
                          .message = "this server keeps no packets (--packet_bytes is 0)",
                          .violations = {{"packets", "this server keeps none"}}});
}

PacketService::PacketService(PacketStore& store, const Frontend& frontend)
    : Service(frontend), store_(store) {
  AnswerLater("PacketService/ListPackets", &PacketService::List);
  AnswerLater("PacketService/DeletePacket", &PacketService::Delete);
}

void PacketService::List(const v1::ListPacketsRequest& request,
                         const std::shared_ptr<PendingAnswer<v1::ListPacketsResponse>>& call) {
  if (!store_.any()) return call->Finish(PacketsOff());
  const Identity& caller = call->scope().caller();
  std::string tenant = request.tenant();
  if (std::optional<grpc::Status> refusal = SettleTenant(caller, "tenant", tenant)) {
    return call->Finish(*refusal);
  }
  files_.Post(caller.name, /*weight=*/0, [this, tenant, model = request.model(), call] {
    v1::ListPacketsResponse response;
    for (const PacketStore::Facts& facts : store_.List(tenant, model)) {
      *response.add_packets() = ToProto(facts);
    }
    call->Finish(response);
  });
}

void PacketService::Delete(const v1::DeletePacketRequest& request,
                           const std::shared_ptr<PendingAnswer<v1::DeletePacketResponse>>& call) {
  if (!store_.any()) return call->Finish(PacketsOff());
  const Identity& caller = call->scope().caller();
  std::string tenant = request.tenant();
  if (std::optional<grpc::Status> refusal = SettleTenant(caller, "tenant", tenant)) {
    return call->Finish(*refusal);
  }
  files_.Post(caller.name, /*weight=*/0, [this, tenant, id = request.id(), call] {
    const absl::Status deleted = store_.Delete(tenant, id);
    if (absl::IsNotFound(deleted)) {
      return call->Finish(NotFound("packet", id, deleted.message()));
    }
    if (!deleted.ok()) return call->Finish(ToGrpc(deleted));
    call->Finish(v1::DeletePacketResponse());
  });
}

}  // namespace epikv
