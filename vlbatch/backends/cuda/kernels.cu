// Kernels on raw pointers: rows of a batch, features of a step, positions of its decode rows.
//
// What changes from step to step is one record of int32 words. The _by_value kernels take it as an
// argument, so that nothing is uploaded; the _staged ones read it from device memory, for records
// that are too long and for captured graphs, whose arguments are frozen. A record begins with its
// count and with three more words; the Python beside this file that fills it says what follows.

constexpr int kHeaderWords = 4;
constexpr int kSliceBytes = 256;

#ifndef ARGUMENT_WORDS
#define ARGUMENT_WORDS 1000  // all arguments of a launch together fit 4 KB
#define SHORT_WORDS 300      // a launch takes the longer, the more it is given
#endif

template <int kWords>
struct Words {
  __align__(16) int words[kWords];
};
using Record = Words<ARGUMENT_WORDS>;
using ShortRecord = Words<SHORT_WORDS>;

// -- moves of rows ------------------------------------------------------------------------------
// A block owns the same columns of every row of one field: a slice. It reads what moves into shared
// memory, waits for all its threads, and writes it, so that chains and cycles of rows need no order
// and no block needs another.

struct Slice {
  unsigned long long base;  // address of its columns in row 0
  long long stride;         // bytes from a row to the next
  int bytes;                // columns, at most kSliceBytes
  int column;               // the first, in bytes from the start of the row
  int ragged;               // which list of prefix widths limits it, -1: none
  int log2_word;            // bytes of a load: what base, stride and bytes are multiples of
  int num_remapped_rows;    // rows that hold row numbers, 0: none
  int remapped_bytes;       // of one row number
  int is_moved;
  int unused;
  uint4 fill;               // the default, repeated
};
static_assert(sizeof(Slice) == 64, "the Python side builds these");

// Record: number of operations, number of old rows; then destination rows, source rows (-1: set to
// the default), and for each ragged field the bytes to write, one word an operation each.
struct Moves {
  int num_ops;
  int num_old_rows;
  const int* destinations;  // in shared memory, the sources behind them
  const int* sources;
  const int* widths;  // of the ragged field, or null
};

template <typename Word>
__device__ void copy_async(Word* shared, const Word* global) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(Word) >= 4) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (sizeof(Word) == 16) {  // not through L1
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global),
                   "n"(sizeof(Word))
                   : "memory");
    }
    return;
  }
#endif
  *shared = *global;
}

__device__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  __syncthreads();
}

// Narrows the columns until those of all operations fit shared memory, and goes over them in turn.
template <typename Word>
__device__ void move_words(const Slice& slice, const Moves& moves, int4* data, int shared_bytes) {
  Word* staged = reinterpret_cast<Word*>(data);
  const Word fill = *reinterpret_cast<const Word*>(&slice.fill);
  const int span = min(kSliceBytes, 1 << (31 - __clz(shared_bytes / moves.num_ops)));
  for (int at = 0; at < slice.bytes; at += span) {
    char* columns = reinterpret_cast<char*>(slice.base) + at;
    const int num_words = min(span, slice.bytes - at) / static_cast<int>(sizeof(Word));
    const int shift = 32 - __clz(num_words - 1);  // words of an operation, rounded up
    const int total = moves.num_ops << shift;
    const auto is_wanted = [&](int op, int word) {
      const int byte = word * static_cast<int>(sizeof(Word));
      return word < num_words && (!moves.widths || slice.column + at + byte < moves.widths[op]);
    };
    const auto place = [&](int row, int word) {
      return reinterpret_cast<Word*>(columns + row * slice.stride) + word;
    };
#pragma unroll 1  // many warps hide the latency, and little code is fetched sooner
    for (int i = threadIdx.x; i < total; i += blockDim.x) {
      const int op = i >> shift;
      const int word = i - (op << shift);
      const int source = moves.sources[op];
      if (source >= 0 && is_wanted(op, word)) copy_async(staged + i, place(source, word));
    }
    wait_for_copies();
#pragma unroll 1
    for (int i = threadIdx.x; i < total; i += blockDim.x) {
      const int op = i >> shift;
      const int word = i - (op << shift);
      if (!is_wanted(op, word)) continue;
      *place(moves.destinations[op], word) = moves.sources[op] >= 0 ? staged[i] : fill;
    }
    __syncthreads();
  }
}

// Looks up every row number of the slice, moved or not; one that names no row becomes -1.
template <typename Int>
__device__ void remap(const Slice& slice, const Moves& moves, int4* data) {
  int* new_row_of = reinterpret_cast<int*>(data);
  for (int row = threadIdx.x; row < moves.num_old_rows; row += blockDim.x) new_row_of[row] = row;
  __syncthreads();
  for (int op = threadIdx.x; op < moves.num_ops; op += blockDim.x)
    new_row_of[moves.destinations[op]] = -1;
  __syncthreads();
  for (int op = threadIdx.x; op < moves.num_ops; op += blockDim.x)
    if (moves.sources[op] >= 0) new_row_of[moves.sources[op]] = moves.destinations[op];
  __syncthreads();
  const int per_row = slice.bytes / static_cast<int>(sizeof(Int));
  for (int i = threadIdx.x; i < slice.num_remapped_rows * per_row; i += blockDim.x) {
    const int row = i / per_row;
    Int* value = reinterpret_cast<Int*>(slice.base + row * slice.stride) + (i - row * per_row);
    const bool is_row = *value >= 0 && *value < static_cast<long long>(moves.num_old_rows);
    *value = static_cast<Int>(is_row ? new_row_of[*value] : -1);
  }
}

// Shared memory: the operations, and behind them shared_bytes for the data.
__device__ void move_slice(const Slice* slices, const int* record, int shared_bytes) {
  extern __shared__ int4 shared[];
  const int num_ops = record[0];
  if (num_ops == 0) return;
  const int* lists = record + kHeaderWords;
#if __CUDA_ARCH__
  // Threads read the lists side by side: as generic loads, since constant ones go one by one.
  asm volatile("" : "+l"(lists));
#endif
  int* rows = reinterpret_cast<int*>(shared);
  int4* data = shared + (num_ops + 1) / 2;
  const Slice slice = slices[blockIdx.x];
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * num_ops; i += blockDim.x) rows[i] = lists[i];
  __syncthreads();
  const Moves moves = {
      num_ops, record[1], rows, rows + num_ops,
      slice.ragged < 0 ? nullptr : lists + (2 + slice.ragged) * num_ops,
  };
  if (slice.is_moved) {
    switch (slice.log2_word) {
      case 0: move_words<unsigned char>(slice, moves, data, shared_bytes); break;
      case 1: move_words<unsigned short>(slice, moves, data, shared_bytes); break;
      case 2: move_words<unsigned int>(slice, moves, data, shared_bytes); break;
      case 3: move_words<uint2>(slice, moves, data, shared_bytes); break;
      default: move_words<uint4>(slice, moves, data, shared_bytes);
    }
  }
  if (slice.num_remapped_rows > 0) {
    switch (slice.remapped_bytes) {
      case 1: remap<signed char>(slice, moves, data); break;
      case 2: remap<short>(slice, moves, data); break;
      case 4: remap<int>(slice, moves, data); break;
      default: remap<long long>(slice, moves, data);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 4)
    move_rows_by_value(const Slice* slices, int shared_bytes, const __grid_constant__ Record record) {
  move_slice(slices, record.words, shared_bytes);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    move_few_rows_by_value(const Slice* slices, int shared_bytes,
                           const __grid_constant__ ShortRecord record) {
  move_slice(slices, record.words, shared_bytes);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    move_rows_staged(const Slice* slices, int shared_bytes, const int* record) {
  move_slice(slices, record, shared_bytes);
}

// -- features of a step ---------------------------------------------------------------------------
// Record: number of runs, number of feature rows, log2 of the bytes of a load, 0; then for each run
// (consecutive feature rows for consecutive tokens) the address of its first row, two words; then
// the number of its first row; then its first token. A warp copies a row.

template <typename Word>
__device__ void copy_row(char* to, const char* from, int bytes, int lane) {
  constexpr int kInFlight = 4;
  const Word* source = reinterpret_cast<const Word*>(from);
  Word* destination = reinterpret_cast<Word*>(to);
  const int num_words = bytes / static_cast<int>(sizeof(Word));
  for (int first = lane; first < num_words; first += 32 * kInFlight) {
    Word taken[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + 32 * i < num_words) taken[i] = __ldg(source + first + 32 * i);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + 32 * i < num_words) destination[first + 32 * i] = taken[i];
  }
}

__device__ void gather_row(char* out, int row_bytes, const int* record) {
  const int num_runs = record[0];
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  const int lane = threadIdx.x & 31;
  if (row >= record[1]) return;
  const auto* addresses = reinterpret_cast<const unsigned long long*>(record + kHeaderWords);
  const int* first_rows = record + kHeaderWords + 2 * num_runs;
  const int* first_tokens = first_rows + num_runs;
  int run = 0;  // the last that starts at or before the row
  for (int past = num_runs; past - run > 1;) {
    const int middle = (run + past) >> 1;
    (first_rows[middle] <= row ? run : past) = middle;
  }
  const long long offset = row - first_rows[run];
  const char* from = reinterpret_cast<const char*>(addresses[run]) + offset * row_bytes;
  char* to = out + (first_tokens[run] + offset) * row_bytes;
  switch (record[2]) {
    case 0: copy_row<unsigned char>(to, from, row_bytes, lane); break;
    case 1: copy_row<unsigned short>(to, from, row_bytes, lane); break;
    case 2: copy_row<unsigned int>(to, from, row_bytes, lane); break;
    case 3: copy_row<uint2>(to, from, row_bytes, lane); break;
    default: copy_row<uint4>(to, from, row_bytes, lane);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    gather_features_by_value(char* out, int row_bytes, const __grid_constant__ Record record) {
  gather_row(out, row_bytes, record.words);
}

extern "C" __global__ void __launch_bounds__(256)
    gather_features_staged(char* out, int row_bytes, const int* record) {
  gather_row(out, row_bytes, record);
}

// -- positions of decode rows -----------------------------------------------------------------------
// Position = index of the token + delta of its request, the same on every axis. Tokens that belong
// to no row (the pads of a captured size) get position 0.

extern "C" __global__ void __launch_bounds__(256)
    decode_positions(long long* out, long long axis_stride, int num_axes,
                     const long long* delta_of_slot, const int* slot_of_row,
                     const int* index_of_row, const int* query_start, int num_rows,
                     int num_tokens) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const auto write = [&](int token, long long position) {
    for (int axis = 0; axis < num_axes; ++axis) out[axis * axis_stride + token] = position;
  };
  if (i < num_rows && slot_of_row[i] >= 0) {
    const int stop = min(query_start[i + 1], num_tokens);
    long long position = index_of_row[i] + delta_of_slot[slot_of_row[i]];
    for (int token = query_start[i]; token < stop; ++token, ++position) write(token, position);
  }
  if (i < num_tokens && i >= query_start[num_rows]) write(i, 0);
}

// The least that a launch can do; what the launches above are timed against.
extern "C" __global__ void do_nothing() {}
