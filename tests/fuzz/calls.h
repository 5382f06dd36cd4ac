#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

// Calls as an input has them, parted by empty lines: "GenerationService/Score" or, of a body that
// is sent as it is, "wire GenerationService/Score"; then the body, else in text format.

namespace epikv {

struct FuzzCall {
  const google::protobuf::MethodDescriptor* method = nullptr;
  bool wire = false;
  std::string body;

  std::unique_ptr<google::protobuf::Message> NewRequest() const {
    return New(method->input_type());
  }
  std::unique_ptr<google::protobuf::Message> NewResponse() const {
    return New(method->output_type());
  }
  std::string path() const {
    return absl::StrCat("/", method->service()->full_name(), "/", method->name());
  }
  // Nothing where the body is no text format.
  std::unique_ptr<google::protobuf::Message> ParseBody() const {
    auto request = NewRequest();
    google::protobuf::TextFormat::Parser parser;
    parser.SetRecursionLimit(100);  // of the wire, too
    return parser.ParseFromString(body, request.get()) ? std::move(request) : nullptr;
  }

 private:
  static std::unique_ptr<google::protobuf::Message> New(const google::protobuf::Descriptor* type) {
    auto& factory = *google::protobuf::MessageFactory::generated_factory();
    return std::unique_ptr<google::protobuf::Message>(factory.GetPrototype(type)->New());
  }
};

inline std::vector<FuzzCall> ParseCalls(absl::string_view input) {
  google::protobuf::SetLogHandler(nullptr);  // text that is not UTF-8 is no news
  std::vector<FuzzCall> calls;
  for (absl::string_view text : absl::StrSplit(input, "\n\n", absl::SkipEmpty())) {
    std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('\n', 1));
    absl::string_view name = parts.first;
    const bool wire = absl::ConsumePrefix(&name, "wire ");
    const auto* method = google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(
        absl::StrReplaceAll(absl::StrCat("epikv.v1.", name), {{"/", "."}}));
    if (method != nullptr) calls.push_back({method, wire, std::move(parts.second)});
  }
  return calls;
}

inline std::string PrintCalls(const std::vector<FuzzCall>& calls) {
  return absl::StrJoin(calls, "\n\n", [](std::string* out, const FuzzCall& call) {
    absl::StrAppend(out, call.wire ? "wire " : "", call.method->service()->name(), "/",
                    call.method->name(), "\n", call.body);
  });
}

}  // namespace epikv
