#include "server/call/wire.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "runtime/text/utf8.h"
#include "server/base/errors.h"

namespace epikv {
namespace {

namespace pb = google::protobuf;

// Turns strings into bytes, and maps into the repeated entries that they are on the wire.
void AcceptAnyBytes(pb::DescriptorProto& type) {
  for (pb::FieldDescriptorProto& field : *type.mutable_field()) {
    if (field.type() == pb::FieldDescriptorProto::TYPE_STRING) {
      field.set_type(pb::FieldDescriptorProto::TYPE_BYTES);
    }
  }
  for (pb::DescriptorProto& nested : *type.mutable_nested_type()) AcceptAnyBytes(nested);
  type.mutable_options()->clear_map_entry();
}

// Twins of message types that differ in one thing: their strings may hold any bytes. So a request
// that does not parse can be read after all, to say what is wrong with it.
class LenientTypes {
 public:
  std::unique_ptr<pb::Message> New(const pb::Descriptor& type) {
    absl::MutexLock lock(&mu_);
    AddFile(*type.file());
    return std::unique_ptr<pb::Message>(
        factory_.GetPrototype(pool_.FindMessageTypeByName(type.full_name()))->New());
  }

 private:
  void AddFile(const pb::FileDescriptor& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (pool_.FindFileByName(file.name()) != nullptr) return;
    for (int i = 0; i < file.dependency_count(); ++i) AddFile(*file.dependency(i));
    pb::FileDescriptorProto copy;
    file.CopyTo(&copy);
    for (pb::DescriptorProto& type : *copy.mutable_message_type()) AcceptAnyBytes(type);
    pool_.BuildFile(copy);
  }

  absl::Mutex mu_;
  pb::DescriptorPool pool_ ABSL_GUARDED_BY(mu_);
  pb::DynamicMessageFactory factory_ ABSL_GUARDED_BY(mu_);
};

void CheckText(const std::string& path, const std::string& text,
               std::vector<FieldViolation>& violations) {
  if (violations.size() == kMaxViolations) return;
  if (const auto at = FirstInvalidUtf8(text)) {
    violations.push_back({path, absl::StrCat("is not UTF-8 at byte ", *at)});
  }
}

void FindInvalidText(const pb::Message& message, const std::string& prefix,
                     std::vector<FieldViolation>& violations) {
  const pb::Reflection& reflection = *message.GetReflection();
  std::vector<const pb::FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const pb::FieldDescriptor* field : fields) {
    const bool is_text = field->type() == pb::FieldDescriptor::TYPE_BYTES;
    const bool is_message = field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE;
    if (!is_text && !is_message) continue;
    const std::string path = absl::StrCat(prefix, prefix.empty() ? "" : ".", field->name());
    if (!field->is_repeated()) {
      if (is_text) CheckText(path, reflection.GetString(message, field), violations);
      if (is_message) FindInvalidText(reflection.GetMessage(message, field), path, violations);
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      if (violations.size() == kMaxViolations) return;
      const std::string item = absl::StrCat(path, "[", i, "]");
      if (is_text) CheckText(item, reflection.GetRepeatedString(message, field, i), violations);
      if (is_message) {
        FindInvalidText(reflection.GetRepeatedMessage(message, field, i), item, violations);
      }
    }
  }
}

// Why `bytes` are no message of this type.
Rejection Diagnose(const std::string& bytes, const pb::Descriptor& type) {
  static auto& types = *new LenientTypes;  // never destroyed: RPC threads may outlive main
  const Rejection malformed{
      .reason = std::string(kMalformed),
      .message = absl::StrCat("the bytes of the request are not a message ", type.full_name())};
  const std::unique_ptr<pb::Message> lenient = types.New(type);
  if (!lenient->ParsePartialFromString(bytes)) return malformed;
  std::vector<FieldViolation> violations;
  FindInvalidText(*lenient, "", violations);
  if (violations.empty()) return malformed;
  return InvalidRequest(std::move(violations), kNotUtf8);
}

}  // namespace

std::optional<Rejection> wire_internal::ParseInto(const grpc::ByteBuffer& bytes,
                                                  pb::Message& message) {
  grpc::ByteBuffer readable = bytes;  // the reader drains it
  grpc::ProtoBufferReader reader(&readable);
  if (message.ParseFromZeroCopyStream(&reader)) return std::nullopt;

  std::string flat;
  std::vector<grpc::Slice> slices;
  if (bytes.Dump(&slices).ok()) {
    for (const grpc::Slice& slice : slices) {
      flat.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
  }
  return Diagnose(flat, *message.GetDescriptor());
}

grpc::ByteBuffer Serialize(const pb::Message& message) {
  grpc::Slice slice(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace epikv
