#pragma once

#include <string>
#include <vector>

namespace epikv {

enum class ChatRole { kSystem, kUser, kAssistant, kTool };

// A function that the model asked for.
struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // a JSON object
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string content;
  // Of the assistant's: what was thought before it, and the calls behind it.
  std::string reasoning = {};
  std::vector<ToolCall> calls = {};
  // Of a tool's: whose result it is.
  std::string call_id = {};
  std::string name = {};  // of the function
};

// A function that the model may ask for.
struct ChatTool {
  std::string name;
  std::string description;  // empty: none
  std::string parameters;   // JSON schema of its arguments; empty: none is told
};

}  // namespace epikv
