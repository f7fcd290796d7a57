// What may go wrong at the border of a shared library: errors in both directions, and a user's own group.
#include <clowder/group.h>
#include <clowder/layer.h>
#include <clowder/status.h>
#include <clowder/types.h>

#include <cstdio>
#include <cstring>

namespace {

// A group of a user's, which fails when the library calls it.
class FailingGroup : public clowder::Group {
 public:
  int size() const override { return 1; }
  const std::vector<int>& local_ranks() const override { return ranks_; }
  std::shared_ptr<clowder::SymmetricMemory> allocate(std::size_t) override {
    throw clowder::Error(clowder::ErrorCode::kUnsupported, "no memory here");
  }

 private:
  std::vector<int> ranks_ = {0};
};

clowder::LayerShape good_shape() {
  clowder::LayerShape shape;
  shape.hidden = shape.intermediate = 32;
  shape.num_experts = shape.topk = 1;
  shape.max_tokens = 4;
  return shape;
}

// Whether making a workspace throws an error with this code that begins with these words.
bool is_refused(const clowder::LayerShape& shape, const std::shared_ptr<clowder::Group>& group, clowder::ErrorCode code,
                const char* words) {
  try {
    clowder::Workspace workspace(shape, group);
  } catch (const clowder::Error& error) {
    return error.code() == code && std::strncmp(error.what(), words, std::strlen(words)) == 0;
  }
  return false;
}

}  // namespace

int main() {
  using clowder::ErrorCode;
  clowder::LayerShape bad = good_shape();
  bad.hidden = 33;
  const bool ok = is_refused(bad, clowder::make_virtual_group(1), ErrorCode::kArgument, "hidden: 33") &&
                  is_refused(good_shape(), std::make_shared<FailingGroup>(), ErrorCode::kUnsupported, "no memory") &&
                  clowder::make_threaded_groups(2, 1.0).size() == 2 && clowder::Workspace::min_ring_rows() > 0 &&
                  std::strcmp(to_string(clowder::EngineKind::kCpu), "cpu") == 0 &&
                  to_string(clowder::WaitReport{0, 1, "forward", "dispatch", "done"}).size() > 10;
  std::puts(ok ? "consumer: fine" : "consumer: an error was lost or another one came");
  return ok ? 0 : 1;
}
