#include "policies/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

// Files by hand: what they hold, and whether they may be read.

namespace epikv {
namespace safetensors_test {

using testing::ElementsAre;
using testing::HasSubstr;

std::string File(const std::string& header, const std::string& data) {
  uint64_t size = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &size, 8);
  return bytes + header + data;
}

template <class T>
std::string Bytes(std::initializer_list<T> values) {
  std::string bytes;
  for (const T& value : values) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  return bytes;
}

std::string Said(const std::string& file) {
  const absl::StatusOr<Safetensors> arrays = ReadSafetensors(file);
  EXPECT_EQ(arrays.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(arrays.status().message());
}

TEST(SafetensorsTest, ArraysOfEachTypeComeInFp32) {
  const std::string header = R"({"__metadata__": {"by": "a tool"},
      "c": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]},
      "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
      "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [28, 28]},
      "b": {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]}})";
  const std::string data = Bytes({1.0f, -2.5f, 3e38f, 0.0f}) +
                           Bytes<uint16_t>({0x3c00, 0xc100, 0x0001, 0x7bff}) +
                           Bytes<uint16_t>({0x3f80, 0xc000});
  const absl::StatusOr<Safetensors> file = ReadSafetensors(File(header, data));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata.at("by"), "a tool");
  const NamedArrays& arrays = file->arrays;
  ASSERT_EQ(arrays.size(), 4u);
  EXPECT_THAT(arrays.at("a").shape, ElementsAre(2, 2));
  EXPECT_THAT(arrays.at("a").values, ElementsAre(1, -2.5f, 3e38f, 0));
  EXPECT_THAT(arrays.at("b").values, ElementsAre(1, -2.5f, 0x1p-24f, 65504));
  EXPECT_THAT(arrays.at("c").values, ElementsAre(1, -2));
  EXPECT_THAT(arrays.at("none").values, ElementsAre());
}

TEST(SafetensorsTest, WhatIsNoSuchFileIsToldSo) {
  EXPECT_THAT(Said(""), HasSubstr("ends before its header"));
  EXPECT_THAT(Said(std::string(8, '\xff')), HasSubstr("ends before its header does"));
  EXPECT_THAT(Said(File("{\"a\": ", "")), HasSubstr("no JSON object"));
  EXPECT_THAT(Said(File("[]", "")), HasSubstr("no JSON object"));
  EXPECT_THAT(Said(File("{}", "1234")), HasSubstr("left over"));
}

TEST(SafetensorsTest, WhatIsWrongWithAnArrayIsTold) {
  auto said = [](const std::string& facts, const std::string& data = Bytes({1.0f, 2.0f})) {
    const std::string message = Said(File("{\"weight\": " + facts + "}", data));
    EXPECT_THAT(message, HasSubstr("weight: "));
    return message;
  };
  auto of = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"dtype\": " + dtype + ", \"shape\": " + shape + ", \"data_offsets\": " + offsets +
           "}";
  };
  EXPECT_THAT(said("7"), HasSubstr("is no object"));
  EXPECT_THAT(said(of("\"I64\"", "[1]", "[0, 8]")), HasSubstr("must be F32, F16 or BF16"));
  EXPECT_THAT(said(of("null", "[1]", "[0, 8]")), HasSubstr("must be F32, F16 or BF16"));
  for (const char* shape : {"2", "null", "{}"}) {
    EXPECT_THAT(said(of("\"F32\"", shape, "[0, 8]")), HasSubstr("shape must be a list"));
  }
  for (const char* shape : {"[-2]", "[1.5]", "[\"2\"]", "[18446744073709551615]"}) {
    EXPECT_THAT(said(of("\"F32\"", shape, "[0, 8]")), HasSubstr("shape must be of counts"));
  }
  EXPECT_THAT(said(of("\"F32\"", "[3]", "[0, 8]")), HasSubstr("more than there is"));
  EXPECT_THAT(said(of("\"F32\"", "[4294967296, 4294967296]", "[0, 8]")),
              HasSubstr("more than there is"));
  for (const char* offsets : {"[0]", "[0, 8, 8]", "null", "[8, 0]", "[0, 12]", "[-1, 7]"}) {
    EXPECT_THAT(said(of("\"F32\"", "[2]", offsets)), HasSubstr("not within the file")) << offsets;
  }
  EXPECT_THAT(said(of("\"F32\"", "[1]", "[0, 8]")), HasSubstr("disagree"));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF}) {
    EXPECT_THAT(said(of("\"F32\"", "[2]", "[0, 8]"), Bytes({1.0f, bad})),
                HasSubstr("number 1 is not finite"));
  }
  EXPECT_THAT(said(of("\"F16\"", "[1]", "[0, 2]"), Bytes<uint16_t>({0x7c00})),
              HasSubstr("number 0 is not finite"));
}

TEST(SafetensorsTest, BytesAreOfOneArrayEach) {
  const std::string a = R"("a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]})";
  const std::string data = Bytes({1.0f, 2.0f, 3.0f});
  EXPECT_THAT(
      Said(File("{" + a + R"(, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}})",
                data)),
      HasSubstr("overlap"));
  EXPECT_THAT(Said(File("{" + a + "}", data)), HasSubstr("left over"));
  EXPECT_THAT(Said(File("{" + a + ", " + a + "}", Bytes({1.0f, 2.0f}))),
              HasSubstr("two arrays of one name"));
}

// Copying what is nested so deeply would end the stack.
TEST(SafetensorsTest, DepthIsBounded) {
  const std::string deep(1 << 20, '[');
  const std::string end(1 << 20, ']');
  const std::string facts = R"({"a": {"dtype": "F32", "data_offsets": [0, 8], "shape": )";
  EXPECT_THAT(Said(File(facts + deep + end + "}}", Bytes({1.0f, 2.0f}))), HasSubstr("a: "));
  EXPECT_THAT(Said(File(deep + end, "")), HasSubstr("no JSON object"));
}

}  // namespace safetensors_test
}  // namespace epikv
