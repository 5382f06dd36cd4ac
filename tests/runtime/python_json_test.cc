// Expected texts are json.dumps(json.loads(text), ensure_ascii=False, indent=indent).
#include "runtime/text/chat/python_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace python_json_test {

using testing::HasSubstr;

TEST(PythonJsonTest, WritesAsJsonDumps) {
  EXPECT_EQ(*PythonJson("{\"b\":[1,-2.5,1e3,true,null],\"a\":{}, \"c\" : [ ]}"),
            "{\"b\": [1, -2.5, 1e3, true, null], \"a\": {}, \"c\": []}");
  EXPECT_EQ(*PythonJson("\"\\u00e9\\u2028\\/ \\\"\\\\\\n\\u0001\\u007f\""),
            "\"\u00e9\u2028/ \\\"\\\\\\n\\u0001\x7f\"");
  EXPECT_EQ(*PythonJson("123456789012345678901234567890"), "123456789012345678901234567890");
  EXPECT_EQ(*PythonJson("{\"a\":[1,{\"b\":2}],\"c\":[],\"d\":{}}", 4),
            "{\n    \"a\": [\n        1,\n        {\n            \"b\": 2\n        }\n    ],\n"
            "    \"c\": [],\n    \"d\": {}\n}");
}

TEST(PythonJsonTest, SaysWhatIsWrong) {
  EXPECT_THAT(PythonJson("{\"a\": }").status().message(), HasSubstr("is no JSON at byte 7"));
  EXPECT_FALSE(PythonJson("").ok());
  EXPECT_FALSE(PythonJson("{} {}").ok());
  EXPECT_FALSE(PythonJson("NaN").ok());
  EXPECT_THAT(PythonJson("{\"a\": 1, \"a\": 2}").status().message(), HasSubstr("'a' twice"));
  EXPECT_TRUE(PythonJson(absl::StrCat(std::string(64, '['), std::string(64, ']'))).ok());
  EXPECT_THAT(PythonJson(std::string(100'000, '[')).status().message(),
              HasSubstr("deeper than 64"));
}

}  // namespace python_json_test
}  // namespace epikv
