#include "runtime/model/module_reader.h"

#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/frontend/lexer.h>
#include <torch/csrc/jit/frontend/parser.h>
#include <torch/csrc/jit/frontend/tree_views.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/import_source.h>
#include <torch/csrc/jit/serialization/storage_context.h>
#include <torch/csrc/jit/serialization/unpickler.h>
#include <unistd.h>
#include <zlib.h>

#include <memory>
#include <set>
#include <stdexcept>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "runtime/base/checksums.h"
#include "runtime/model/allowed_operators.h"

namespace epikv {
namespace {

namespace jit = torch::jit;

using torch::jit::Block;
using torch::jit::ClassDef;
using torch::jit::Def;
using torch::jit::Function;
using torch::jit::Node;
using torch::jit::Source;
using torch::jit::TreeRef;

// Beyond this LibTorch's parser and compiler, which recurse, may run out of stack.
constexpr int kMostNested = 128;

// Thrown where reading has to stop: LibTorch's functions call ours.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::shared_ptr<Source> SourceOf(caffe2::serialize::PyTorchStreamReader& archive,
                                 const std::string& record) {
  const auto [data, size] = archive.getRecord(record);
  return std::make_shared<Source>(std::string(static_cast<const char*>(data.get()), size), record,
                                  1);
}

// Refuses code that nests deeper than kMostNested. Brackets and blocks nest; and so may every
// operator, and every bracket behind an expression, with what stands beside it, up to the next
// comma or the end of the statement. That an operator need not nest is not minded: no statement of
// ours has so many.
class NestingCheck {
 public:
  void Read(jit::Lexer& lexer) {
    for (; lexer.cur().kind != jit::TK_EOF; lexer.next()) {
      Note(lexer.cur().kind);
      if (depth_ > kMostNested) throw Refused("its code is nested too deep to be compiled");
    }
  }

 private:
  void Note(int kind) {
    switch (kind) {
      case jit::TK_IDENT:
      case jit::TK_NUMBER:
      case jit::TK_STRINGLITERAL:
        break;
      case '(':
      case '[':
      case '{':
        chains_.push_back(0);
        ++depth_;
        break;
      case ')':
      case ']':
      case '}':
        if (chains_.size() == 1) break;  // the parser refuses it
        depth_ -= 1 + chains_.back();
        chains_.pop_back();
        Chain();  // f()()
        break;
      case ',':
      case jit::TK_NEWLINE:
        depth_ -= chains_.back();
        chains_.back() = 0;
        break;
      case jit::TK_DEDENT:
        --depth_;
        break;
      case jit::TK_INDENT:
      case jit::TK_ELIF:  // stands in what is else; for good, as what follows it may be as well
        ++depth_;
        break;
      default:
        Chain();
    }
  }
  void Chain() {
    ++chains_.back();
    ++depth_;
  }

  std::vector<int> chains_ = {
      0};  // operators since the last comma, outside and in each open bracket
  int depth_ = 0;
};

// What LibTorch computes as it reads a class or a function, to have its value. Only literals need
// no computing.
bool IsLiteral(const TreeRef& tree) {
  switch (tree->kind()) {
    case jit::TK_CONST:
    case jit::TK_STRINGLITERAL:
    case jit::TK_TRUE:
    case jit::TK_FALSE:
    case jit::TK_NONE:
      return true;
    case jit::TK_VAR: {
      const std::string& name = jit::Var(tree).name().name();
      return name == "inf" || name == "nan";
    }
    case jit::TK_UNARY_MINUS:
    case jit::TK_LIST_LITERAL:
    case jit::TK_TUPLE_LITERAL:
    case jit::TK_DICT_LITERAL:
    case jit::TK_LIST:
      return absl::c_all_of(tree->trees(), IsLiteral);
    case jit::TK_APPLY: {  // annotate(List[int], [1, 2])
      const jit::Apply apply(tree);
      return apply.callee().kind() == jit::TK_VAR &&
             jit::Var(apply.callee()).name().name() == "annotate" && apply.inputs().size() == 2 &&
             apply.attributes().empty() && IsLiteral(apply.inputs()[1]);
    }
    default:
      return false;
  }
}

void CheckFunction(const Def& def) {
  const std::string& name = def.name().name();
  if (name == "__setstate__" || name == "__getstate__") {
    throw Refused(absl::StrCat("its code has ", name,
                               ", which is not allowed: it would run as the file is read"));
  }
  for (const jit::Param& param : def.decl().params()) {
    if (param.defaultValue().present() && !IsLiteral(param.defaultValue().get())) {
      throw Refused(absl::StrCat("the default of '", param.ident().name(), "' of ", name,
                                 " is no literal: it would be computed as the file is read"));
    }
  }
}

void CheckClass(const ClassDef& def) {
  const std::string& name = def.name().name();
  for (const jit::Stmt& statement : def.body()) {
    if (statement.kind() == jit::TK_DEF) CheckFunction(Def(statement));
    if (statement.kind() != jit::TK_ASSIGN) continue;
    const jit::Assign assign(statement);
    if (assign.lhs().kind() == jit::TK_SUBSCRIPT) continue;  // __annotations__["0"] = a type
    if (assign.rhs().present() && !IsLiteral(assign.rhs().get())) {
      throw Refused(absl::StrCat("a constant of ", name,
                                 " is no literal: it would be computed as the file is read"));
    }
  }
}

// What is there before anything is compiled.
void CheckSource(const std::shared_ptr<Source>& source) {
  {
    jit::Lexer lexer(source);
    NestingCheck().Read(lexer);
  }
  jit::Parser parser(source);
  jit::Lexer& lexer = parser.lexer();
  while (lexer.cur().kind != jit::TK_EOF) {
    if (lexer.cur().kind == jit::TK_CLASS_DEF) {
      CheckClass(ClassDef(parser.parseClass()));
    } else if (lexer.cur().kind == jit::TK_DEF) {
      CheckFunction(Def(parser.parseFunction(/*is_method=*/false)));
    } else if (lexer.cur().kind == jit::TK_IMPORT || lexer.cur().kind == jit::TK_IDENT) {
      lexer.next();  // a version, an import
      while (lexer.cur().kind != jit::TK_NEWLINE && lexer.cur().kind != jit::TK_EOF) lexer.next();
      lexer.nextIf(jit::TK_NEWLINE);
    } else {
      throw Refused("its code has more than classes and functions");
    }
  }
}

// Calls of functions, and operators that are not allowed.
class FunctionReader {
 public:
  // All that `function` reaches.
  void Read(Function& function) {
    auto* const graph = dynamic_cast<jit::GraphFunction*>(&function);
    if (graph == nullptr) {
      violations_.insert(
          absl::StrCat("its code calls ", function.name(), ", which is not its own"));
      return;
    }
    if (!reached_.insert(&function).second) return;
    Read(graph->graph()->block());
  }

  bool reached(const Function* function) const { return reached_.count(function) > 0; }
  const std::set<std::string>& violations() const { return violations_; }

 private:
  void Read(const Block* block) {
    for (const Node* node : block->nodes()) {
      ReadNode(node);
      for (const Block* inner : node->blocks()) Read(inner);
      if (node->hasAttribute(c10::attr::Subgraph)) {
        Read(node->g(c10::attr::Subgraph)->block());
      }
    }
  }

  void ReadNode(const Node* node) {
    const std::string kind = node->kind().toQualString();
    if (node->kind() == c10::prim::CallMethod) {
      const auto owner = node->inputs()[0]->type()->cast<c10::ClassType>();
      Function* const method =
          owner == nullptr ? nullptr : owner->findMethod(node->s(c10::attr::name));
      if (method == nullptr) {
        violations_.insert(absl::StrCat("its code calls ", node->s(c10::attr::name),
                                        " of an object whose class is not known"));
        return;
      }
      Read(*method);
    } else if (node->kind() == c10::prim::CallFunction) {
      const auto callee = node->inputs()[0]->type()->cast<c10::FunctionType>();
      if (callee != nullptr) Read(*callee->function());
    } else if (!OperatorIsAllowed(kind)) {
      violations_.insert(absl::StrCat("its code calls ", kind, ", which is not allowed"));
    }
  }

  std::set<const Function*> reached_;
  std::set<std::string> violations_;
};

// Methods that a module has whether its forward needs them or not: LibTorch gives them to lists and
// dictionaries of modules.
bool ComesWithTheModule(const std::string& method) {
  return method == "__len__" || method == "__contains__";
}

std::vector<std::string> CodeViolations(const jit::Module& module,
                                        const jit::CompilationUnit& unit) {
  const std::optional<jit::Method> forward = module.find_method("forward");
  if (!forward.has_value()) return {"it has no forward"};
  FunctionReader reader;
  reader.Read(forward->function());
  std::set<std::string> violations = reader.violations();
  for (Function* function : unit.get_functions()) {
    if (reader.reached(function)) continue;
    if (!ComesWithTheModule(function->name())) {
      violations.insert(absl::StrCat("its code has ", function->qualname().qualifiedName(),
                                     ", which forward does not call"));
    }
    FunctionReader unreached;
    unreached.Read(*function);
    violations.insert(unreached.violations().begin(), unreached.violations().end());
  }
  return {violations.begin(), violations.end()};
}

// A file in memory, as long as a tensor is in it.
class MappedFile {
 public:
  // Null: it cannot be mapped.
  static std::shared_ptr<const MappedFile> Open(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return nullptr;
    struct stat facts;
    void* data = MAP_FAILED;
    if (fstat(file, &facts) == 0 && facts.st_size > 0) {
      data = mmap(nullptr, facts.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    }
    close(file);
    if (data == MAP_FAILED) return nullptr;
    return std::shared_ptr<const MappedFile>(new MappedFile(data, facts.st_size));
  }
  ~MappedFile() { munmap(data_, size_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  size_t size() const { return size_; }

 private:
  MappedFile(void* data, size_t size) : data_(data), size_(size) {}

  void* const data_;
  const size_t size_;
};

// Of a tensor that is mapped.
void Unmap(void* file) { delete static_cast<std::shared_ptr<const MappedFile>*>(file); }

// One archive on its way to a module. LibTorch's own reader of modules does the same, and runs what
// a class says of how its objects are read.
class Reader {
 public:
  Reader(caffe2::serialize::PyTorchStreamReader& archive, const std::string& map_from)
      : archive_(archive),
        path_(map_from),
        file_(map_from.empty() ? nullptr : MappedFile::Open(map_from)),
        importer_(
            unit_, &constants_, [this](const std::string& name) { return Find(name); },
            archive.version()) {}

  ReadModule Read() {
    for (const std::string& record : archive_.getAllRecords()) {
      if (IsCode(record)) CheckSource(SourceOf(archive_, record));
    }
    const c10::IValue constants = ReadPickle("constants");
    for (const c10::IValue& constant : constants.toTupleRef().elements()) {
      constants_.push_back(constant);
    }
    const c10::IValue data = ReadPickle("data");
    if (!data.isObject()) throw Refused("its data is no module");
    const jit::Module module(data.toObject());
    std::vector<std::string> violations = CodeViolations(module, *unit_);
    return {.module = module, .violations = std::move(violations)};
  }

 private:
  static bool IsCode(const std::string& record) {
    return absl::StartsWith(record, "code/") && absl::EndsWith(record, ".py");
  }

  // The source of "__torch__.a.b", or none. Its name is the record's, for errors.
  std::shared_ptr<Source> Find(const std::string& name) {
    const std::string record =
        absl::StrCat("code/", absl::StrReplaceAll(name, {{".", "/"}}), ".py");
    return archive_.hasRecord(record) ? SourceOf(archive_, record) : nullptr;
  }

  c10::StrongTypePtr FindType(const c10::QualifiedName& name) {
    if (absl::StartsWith(name.qualifiedName(), "__torch__.torch.classes")) {
      throw Refused(absl::StrCat("it holds an object of ", name.qualifiedName(),
                                 ", a class that is not its own"));
    }
    return c10::StrongTypePtr(unit_, importer_.loadType(name));
  }

  static c10::intrusive_ptr<c10::ivalue::Object> MakeObject(const c10::StrongTypePtr& type,
                                                            c10::IValue attributes) {
    const auto cls = type.type_->expect<c10::ClassType>();
    const auto values = std::move(attributes).toGenericDict();
    auto object = c10::ivalue::Object::create(type, cls->numAttributes());
    for (size_t i = 0; i < cls->numAttributes(); ++i) {
      c10::IValue value = values.at(cls->getAttributeName(i));
      if (!value.type()->isSubtypeOf(*cls->getAttribute(i))) {
        throw Refused(absl::StrCat("its attribute ", cls->getAttributeName(i), " is ",
                                   value.type()->annotation_str(), ", not ",
                                   cls->getAttribute(i)->annotation_str()));
      }
      object->setSlot(i, std::move(value));
    }
    return object;
  }

  c10::IValue ReadPickle(const std::string& name) {
    return jit::readArchiveAndTensors(
        name, /*pickle_prefix=*/"", /*tensor_prefix=*/"",
        [this](const c10::QualifiedName& type) { return FindType(type); }, MakeObject, c10::kCPU,
        archive_, jit::Unpickler::defaultTypeParser, Mapped(name));
  }

  // The weights of a part of the archive, by their names; null: they are to be read.
  std::shared_ptr<jit::DeserializationStorageContext> Mapped(const std::string& name) {
    if (file_ == nullptr) return nullptr;
    const absl::StatusOr<Checksums> checksums = ReadChecksums(path_);
    if (!checksums.ok()) return nullptr;
    auto storages = std::make_shared<jit::DeserializationStorageContext>();
    const std::string folder = name + "/";
    for (const std::string& record : archive_.getAllRecords()) {
      if (!absl::StartsWith(record, folder)) continue;
      const size_t offset = archive_.getRecordOffset(record), size = archive_.getRecordSize(record);
      const bool fits =
          offset % kAlignment == 0 && offset <= file_->size() && size <= file_->size() - offset;
      if (!fits || size == 0) continue;
      const auto* const bytes = reinterpret_cast<const Bytef*>(file_->data() + offset);
      const auto known = checksums->find(record);
      if (known == checksums->end() || crc32_z(0, bytes, size) != known->second) {
        continue;  // it is not stored as it is
      }
      auto* const file = new std::shared_ptr<const MappedFile>(file_);
      storages->addStorage(
          record.substr(folder.size()),
          c10::Storage(c10::Storage::use_byte_size_t(), size,
                       c10::DataPtr(file_->data() + offset, file, &Unmap, c10::kCPU)));
    }
    return storages;
  }
  static constexpr size_t kAlignment = 64;  // that torch writes, and its kernels like

  caffe2::serialize::PyTorchStreamReader& archive_;
  const std::string path_;
  const std::shared_ptr<const MappedFile> file_;  // at path_; null: weights are read
  const std::shared_ptr<jit::CompilationUnit> unit_ = std::make_shared<jit::CompilationUnit>();
  std::vector<c10::IValue> constants_;
  const jit::SourceImporter importer_;
};

}  // namespace

bool IsMapped(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().get_deleter() == &Unmap;
}

ReadModule ReadModuleWithoutRunning(caffe2::serialize::PyTorchStreamReader& archive,
                                    const std::string& map_from) {
  try {
    return Reader(archive, map_from).Read();
  } catch (const Refused& refused) {
    return {.violations = {refused.what()}};
  }
}

}  // namespace epikv
