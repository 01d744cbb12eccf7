// Attention tile tables of one step, written in place: the device version of tiles.py.
//
// Four blocks of NUM_THREADS threads: one a table, and one for the largest lengths. Nothing is read
// on the host and nothing is allocated, so a captured graph can hold the launch. Counts are 64-bit:
// a product of tokens and heads wraps in 32. A step with more tiles than its table holds traps;
// whoever schedules has compared the counts with the bound before.

constexpr int NUM_THREADS = 256;

extern __shared__ long long shared[];  // NUM_THREADS of them

struct Table {
  int* batch_ids;
  int* tile_ids;
  int* num_blocks;
  long long capacity;
};

__device__ long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

// Tiles of one row in table 0 (queries of decodes), 1 (queries of prefills) or 2 (KV of prefills).
__device__ long long num_tiles(int table, int encoder, int decoder, int this_time, int group,
                               int kv_block, int decoder_rows, int encoder_rows) {
  if (table == 0) {
    return encoder == 0 && this_time > 0 ? ceil_div((long long)this_time * group, decoder_rows) : 0;
  }
  if (encoder <= 0) return 0;
  if (table == 1) return ceil_div((long long)encoder * group, encoder_rows);
  return ceil_div((long long)encoder + decoder % kv_block, kv_block);
}

// Packs the tiles of all rows in row order; what an earlier step left behind them is no work.
__device__ void write_table(int which, const Table table, const int* encoder, const int* decoder,
                            const int* this_time, int num_rows, int group, int kv_block,
                            int decoder_rows, int encoder_rows) {
  long long* stops = shared;  // running sum over the rows of a round
  const int thread = threadIdx.x;
  long long total = 0;
  for (int first = 0; first < num_rows; first += NUM_THREADS) {
    const int row = first + thread;
    stops[thread] = row < num_rows ? num_tiles(which, encoder[row], decoder[row], this_time[row],
                                               group, kv_block, decoder_rows, encoder_rows)
                                   : 0;
    __syncthreads();
    for (int step = 1; step < NUM_THREADS; step *= 2) {
      const long long before = thread >= step ? stops[thread - step] : 0;
      __syncthreads();
      stops[thread] += before;
      __syncthreads();
    }
    const long long count = stops[NUM_THREADS - 1];
    if (total + count > table.capacity) __trap();
    for (long long tile = thread; tile < count; tile += NUM_THREADS) {
      int low = 0, high = NUM_THREADS - 1;  // the first row whose tiles stop after this one
      while (low < high) {
        const int middle = (low + high) / 2;
        if (stops[middle] > tile) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      table.batch_ids[total + tile] = first + low;
      table.tile_ids[total + tile] = int(tile - (low ? stops[low - 1] : 0));
    }
    total += count;
    __syncthreads();  // before the next round overwrites the sums
  }
  const long long used = *table.num_blocks;
  for (long long tile = total + thread; tile < used; tile += NUM_THREADS) {
    table.batch_ids[tile] = -1;
    table.tile_ids[tile] = 0;
  }
  __syncthreads();  // all have read the old count
  if (thread == 0) *table.num_blocks = int(total);
}

__device__ void write_max_len(int* max_len, const int* encoder, const int* decoder,
                              const int* this_time, int num_rows) {
  int* largest = reinterpret_cast<int*>(shared);
  if (threadIdx.x < 6) largest[threadIdx.x] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < num_rows; row += NUM_THREADS) {
    const int all = decoder[row] + this_time[row];
    atomicMax(&largest[0], this_time[row]);
    atomicMax(&largest[1], encoder[row]);
    atomicMax(&largest[2], decoder[row]);
    if (this_time[row] > 0) atomicMax(&largest[3], all);
    if (encoder[row] == 0) atomicMax(&largest[4], decoder[row]);
    if (decoder[row] > 0) atomicMax(&largest[5], all);
  }
  __syncthreads();
  if (threadIdx.x < 6) max_len[threadIdx.x] = largest[threadIdx.x];
}

extern "C" __global__ void fill_tile_tables(
    const int* encoder, const int* decoder, const int* this_time, int num_rows, int group,
    int kv_block, int decoder_rows, int encoder_rows, Table decoder_table, Table encoder_table,
    Table kv_table, int* max_len) {
  if (blockIdx.x == 3) {
    write_max_len(max_len, encoder, decoder, this_time, num_rows);
    return;
  }
  const Table table = blockIdx.x == 0 ? decoder_table : blockIdx.x == 1 ? encoder_table : kv_table;
  write_table(blockIdx.x, table, encoder, decoder, this_time, num_rows, group, kv_block,
              decoder_rows, encoder_rows);
}
