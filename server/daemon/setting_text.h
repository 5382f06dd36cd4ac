#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>

#include <string>
#include <vector>

#include "epikv/v1/config.pb.h"

// Settings as text: deploy/epikvd.textproto, which is built in, is the source of their defaults and
// help.

namespace epikv {

// What is wrong with what an operator wrote, a line each.
using Problems = std::vector<std::string>;

// What the parser of text format has to say, one line each.
class ProblemCollector final : public google::protobuf::io::ErrorCollector {
 public:
  // where: a file, or a flag.
  ProblemCollector(std::string where, Problems& problems)
      : where_(std::move(where)), problems_(problems) {}
  void AddError(int line, int column, const std::string& message) override {
    const bool has_lines = line >= 0 && !absl::StartsWith(where_, "--");
    problems_.push_back(has_lines ? absl::StrCat(where_, ":", line + 1, ": ", message)
                                  : absl::StrCat(where_, ": ", message));
  }
  // An unknown field: the parser goes on, so that all of them are named; we do not.
  void AddWarning(int line, int column, const std::string& message) override {
    AddError(line, column, message);
  }

 private:
  const std::string where_;
  Problems& problems_;
};

// where: a file, or a flag. Unknown fields are problems, all of them.
v1::ServerConfig ParseText(const std::string& text, const std::string& where, Problems& problems);

v1::ServerConfig DefaultConfig();

// A field of ServerConfig as deploy/epikvd.textproto presents it.
struct Setting {
  const google::protobuf::FieldDescriptor* field;
  std::vector<std::string> comment;  // lines without "# "
};

// In the file's order.
const std::vector<Setting>& AllSettings();

std::string ValueText(const v1::ServerConfig& config,
                      const google::protobuf::FieldDescriptor& field);

}  // namespace epikv
