// Groups and their symmetric memory.
#include "clowder/group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "clowder/types.h"
#include "group/aligned_memory.h"

namespace clowder {
namespace {

bool is_zero(const std::byte* memory, std::size_t bytes) {
  return std::all_of(memory, memory + bytes, [](std::byte b) { return b == std::byte{0}; });
}

TEST(VirtualGroup, MemoryIsZeroAlignedAndApart) {
  const auto group = make_virtual_group(3);
  EXPECT_EQ(group->size(), 3);
  EXPECT_EQ(group->local_ranks(), (std::vector<int>{0, 1, 2}));
  for (int call = 0; call < 3; ++call) {
    const auto memory = group->allocate(5000);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->base(rank)) % kPageBytes, 0u);
      EXPECT_TRUE(is_zero(memory->base(rank), 5000));
    }
    for (int rank = 0; rank < 3; ++rank) std::fill_n(memory->base(rank), 5000, std::byte{0xff});
    EXPECT_GE(std::abs(memory->base(1) - memory->base(0)), 5000);
  }
}

TEST(ThreadedGroup, TheKthCallsMeet) {
  constexpr int kRanks = 4;
  const auto groups = make_threaded_groups(kRanks, 10.0);
  std::vector<std::vector<std::shared_ptr<SymmetricMemory>>> memory(kRanks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (const std::size_t bytes : {100, 5000}) memory[rank].push_back(groups[rank]->allocate(bytes));
    });
  }
  threads.clear();
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(groups[rank]->size(), kRanks);
    EXPECT_EQ(groups[rank]->local_ranks(), std::vector<int>{rank});
    EXPECT_EQ(memory[rank], memory[0]);
  }
  EXPECT_NE(memory[0][0], memory[0][1]);
}

TEST(ThreadedGroup, AMissingMemberIsATimeout) {
  const auto groups = make_threaded_groups(3, 0.05);
  try {
    groups[1]->allocate(100);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_NE(std::string(error.what()).find("rank 1 waited for 2 other ranks"), std::string::npos);
  }
}

TEST(ThreadedGroup, SizesMustAgree) {
  const auto groups = make_threaded_groups(2, 0.05);
  EXPECT_THROW(groups[0]->allocate(100), Error);
  try {
    groups[1]->allocate(200);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
  }
}

TEST(CallerOwnedGroup, GivesTheCallersMemoryOnce) {
  const AlignedMemory first = allocate_zeroed(4096);
  const AlignedMemory second = allocate_zeroed(4096);
  const auto group = make_caller_owned_group(1, {first.get(), second.get()}, 4096);
  EXPECT_EQ(group->size(), 2);
  EXPECT_EQ(group->local_ranks(), std::vector<int>{1});
  EXPECT_THROW(group->allocate(4097), Error);
  const auto memory = group->allocate(4096);
  EXPECT_EQ(memory->base(0), first.get());
  EXPECT_EQ(memory->base(1), second.get());
  EXPECT_THROW(group->allocate(1), Error);
}

TEST(CallerOwnedGroup, RefusesWhatItCannotUse) {
  const AlignedMemory memory = allocate_zeroed(4096);
  EXPECT_THROW(make_caller_owned_group(0, {}, 4096), Error);
  EXPECT_THROW(make_caller_owned_group(1, {memory.get()}, 4096), Error);
  EXPECT_THROW(make_caller_owned_group(-1, {memory.get()}, 4096), Error);
  EXPECT_THROW(make_caller_owned_group(0, {memory.get(), nullptr}, 4096), Error);
  EXPECT_THROW(make_caller_owned_group(0, {memory.get() + 8}, 4000), Error);
}

TEST(Group, SizesOutOfRangeAreRefused) {
  for (const int size : {0, -1, 100000}) {
    EXPECT_THROW(make_virtual_group(size), Error);
    EXPECT_THROW(make_threaded_groups(size, 1.0), Error);
  }
}

}  // namespace
}  // namespace clowder
