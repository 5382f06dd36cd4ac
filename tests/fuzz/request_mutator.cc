// Changes requests by the structure of their messages, where libFuzzer changes bytes: to bodies
// that are text format, fields are given values, repeated ones and whole calls come and go.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/calls.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace epikv {
namespace {

namespace pb = google::protobuf;
using Random = std::minstd_rand;

constexpr const char* kWords[] = {"",
                                  "w1",
                                  "w1 w2 w3",
                                  "w3",
                                  "full",
                                  "window",
                                  "picky",
                                  "fake",
                                  "a",
                                  "slack",
                                  "mode",
                                  "calm",
                                  "eager",
                                  "strength",
                                  "frozen",
                                  "indexes",
                                  "max_queued_requests",
                                  "default_policy",
                                  "log_level",
                                  "missing",
                                  "w",
                                  "w1 w2",
                                  "w[1-3]( w2)*",
                                  "root ::= \"w1\" | root \" w2\"",
                                  "{\"type\": \"string\"}",
                                  "{\"enum\": [1, \"w1\"]}"};
constexpr double kNumbers[] = {0,   1,   2,          3,          8,    16,          17,   32,
                               63,  64,  127,        128,        0.5,  0.25,        1.5,  -1,
                               100, 1e6, 2147483647, 4294967295, 1e18, -2147483648, 1e-9, 1e308};

std::string SomeText(Random& random) {
  std::string text = kWords[random() % std::size(kWords)];
  if (random() % 4 != 0) return text;
  const size_t size = text.size();
  text.resize(size + 32);
  text.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(text.data()), size, text.size()));
  return text;
}

// A scalar, set or added.
void Give(pb::Message& message, const pb::FieldDescriptor& field, Random& random) {
  const pb::Reflection& r = *message.GetReflection();
  const double number = kNumbers[random() % std::size(kNumbers)];
  const bool add = field.is_repeated();
  using F = pb::FieldDescriptor;
  // Saturates: a cast of what does not fit is undefined.
  const int64_t whole = static_cast<int64_t>(std::max(std::min(number, 9e18), -9e18));
  switch (field.cpp_type()) {
#define GIVE(KIND, TYPE, value) \
  case F::CPPTYPE_##KIND:       \
    return add ? r.Add##TYPE(&message, &field, value) : r.Set##TYPE(&message, &field, value)
    GIVE(INT32, Int32, static_cast<int32_t>(whole));
    GIVE(INT64, Int64, whole);
    GIVE(UINT32, UInt32, static_cast<uint32_t>(whole));
    GIVE(UINT64, UInt64, static_cast<uint64_t>(whole));
    GIVE(DOUBLE, Double, random() % 8 == 0 ? std::nan("") : number);
    GIVE(FLOAT, Float,
         static_cast<float>(random() % 8 == 0 ? std::nan("") : std::min(number, 1e38)));
    GIVE(BOOL, Bool, random() % 2 == 0);
    GIVE(ENUM, EnumValue, static_cast<int>(random() % 5));
    GIVE(STRING, String, SomeText(random));
#undef GIVE
    case F::CPPTYPE_MESSAGE:
      return;
  }
}

void Mutate(pb::Message& message, Random& random, int depth) {
  const pb::Descriptor& type = *message.GetDescriptor();
  const pb::Reflection& r = *message.GetReflection();
  if (type.field_count() == 0) return;
  const pb::FieldDescriptor& field = *type.field(random() % type.field_count());
  if (random() % 6 == 0) return r.ClearField(&message, &field);
  const bool is_message = field.cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE;
  if (!is_message) return Give(message, field, random);
  if (depth == 0) return;
  if (!field.is_repeated()) return Mutate(*r.MutableMessage(&message, &field), random, depth - 1);
  const int size = r.FieldSize(message, &field);
  pb::Message* item = size > 0 && random() % 2 == 0
                          ? r.MutableRepeatedMessage(&message, &field, random() % size)
                          : r.AddMessage(&message, &field);
  for (int i = 0; i < 2; ++i) Mutate(*item, random, depth - 1);
}

std::string Mutated(std::vector<FuzzCall> calls, Random& random) {
  FuzzCall& call = calls[random() % calls.size()];
  const int kind = random() % 12;
  if (kind == 0) {  // another method
    const auto& service = *call.method->service();
    call.method = service.method(random() % service.method_count());
  } else if (kind == 1) {
    calls.push_back(call);
  } else if (kind == 2 && calls.size() > 1) {
    calls.erase(calls.begin() + random() % calls.size());
  } else if (auto request = call.wire ? nullptr : call.ParseBody()) {
    for (int n = 1 + random() % 3; n > 0; --n) Mutate(*request, random, 6);
    pb::TextFormat::PrintToString(*request, &call.body);
  }
  return PrintCalls(calls);
}

}  // namespace
}  // namespace epikv

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  epikv::Random random(seed);
  std::vector<epikv::FuzzCall> calls =
      epikv::ParseCalls({reinterpret_cast<const char*>(data), size});
  if (calls.empty() || random() % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string mutated = epikv::Mutated(std::move(calls), random);
  if (mutated.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, mutated.data(), mutated.size());
  return mutated.size();
}
