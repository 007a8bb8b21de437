// Env is the row store's only access to files. The posix Env is the file system of the machine; test doubles
// imitate a file system.
//
// Several threads may use an Env and its files at once; one thread at a time may use a BatchReader. All
// functions throw IoError. Files must not outlive their Env.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tierstore {

// Offsets, sizes and memory of direct IO are multiples of this.
inline constexpr std::size_t kBlockBytes = 4096;

enum class OpenMode {
  kRead,    // must exist
  kUpdate,  // must exist; read and write
  kCreate,  // must not exist; read and write
};

class File {
 public:
  virtual ~File() = default;

  // Reads up to `size` bytes and returns the number of bytes read, which is smaller only at the end of the
  // file.
  virtual std::size_t Read(std::uint64_t offset, void* data, std::size_t size) = 0;
  // Writes all bytes. When Write throws, any part of the bytes may be written.
  virtual void Write(std::uint64_t offset, const void* data, std::size_t size) = 0;
  // Returns when the contents and the size are durable. A name is durable after Env::SyncDirectory.
  virtual void Sync() = 0;
  virtual void Truncate(std::uint64_t size) = 0;
  virtual std::uint64_t Size() = 0;
  // Returns whether transfers go past the page cache now.
  virtual bool IsDirect() const { return false; }
  // Return the device (below Env::Devices) that has this byte, and the end of the stretch of bytes around the
  // byte that one request can read on that device.
  virtual unsigned DeviceOf(std::uint64_t) const { return 0; }
  virtual std::uint64_t EndOfStretch(std::uint64_t) const { return ~std::uint64_t{0}; }
  // Keeps the file open for a Read from another thread, as long as the result lives. Returns nullptr if
  // `may_wait` and the file can be opened only when another file is no longer in use.
  virtual std::shared_ptr<const void> Hold(bool /*may_wait*/) { return std::make_shared<int>(); }
  virtual const std::string& path() const = 0;
};

struct ReadRequest {
  File* file;
  std::uint64_t offset;  // multiple of kBlockBytes
  std::uint32_t size;    // multiple of kBlockBytes, at most kMaxReadBytes
  unsigned device = 0;   // below the reader's number of devices
};

inline constexpr std::size_t kMaxReadBytes = 64 << 10;

class BatchReader {
 public:
  // The arguments are the request's number, its bytes (block-aligned, valid during the call), and the number
  // of bytes, which is smaller than requested only at the end of the file.
  using Done = std::function<void(std::size_t request, const std::byte* data, std::size_t size)>;

  virtual ~BatchReader() = default;

  // Reads all requests, many at a time, and calls `done` on the calling thread for each request as its bytes
  // arrive, in any order. Throws the first error, of the device or of `done`, after all begun requests have
  // ended.
  virtual void Read(std::span<const ReadRequest> requests, const Done& done) = 0;

  // Names how requests are made: "uring" (io_uring), "pread", or a test double.
  virtual const char* name() const = 0;
};

enum class ReadEngine { kAuto, kIoUring, kPread };

class Env {
 public:
  virtual ~Env() = default;

  // `direct` asks for IO past the page cache. Where the file system refuses direct IO, now or at a transfer,
  // the file uses buffered IO.
  virtual std::unique_ptr<File> Open(const std::string& path, OpenMode mode, bool direct) = 0;
  // Creates a file that may come to have this many bytes.
  virtual std::unique_ptr<File> Create(const std::string& path, bool direct, std::uint64_t /*bytes*/) {
    return Open(path, OpenMode::kCreate, direct);
  }
  virtual bool Exists(const std::string& path) = 0;
  // Returns the names of the entries, without "." and "..", in no particular order.
  virtual std::vector<std::string> List(const std::string& directory) = 0;
  // Replaces the file `to` if there is one.
  virtual void Rename(const std::string& from, const std::string& to) = 0;
  // An absent file is not an error. Open files stay readable.
  virtual void Remove(const std::string& path) = 0;
  virtual void SyncDirectory(const std::string& directory) = 0;
  // Each of `devices` has `queue_depth` requests of its own in flight, so that a slow device does not delay
  // the other devices. kIoUring throws where the kernel refuses io_uring; kAuto then uses pread.
  virtual std::unique_ptr<BatchReader> NewBatchReader(ReadEngine engine, unsigned queue_depth,
                                                      unsigned devices = 1) = 0;
  // Returns the number of devices over which the Env spreads a file's bytes.
  virtual unsigned Devices() const { return 1; }
  // Returns the bytes that files in the directory can still take.
  virtual std::uint64_t FreeBytes(const std::string&) { return ~std::uint64_t{0}; }
  // Closes the descriptors that the Env itself holds. None of the Env's files may be in use.
  virtual void Close() {}
};

// Returns the file system of the machine. The Env lives as long as the process.
Env& PosixEnv();
// Returns the same file system with `directory` held open: names in the directory are found there whatever
// the working directory is, and after a rename of the directory. Throws IoError. This Env may be destroyed
// before its files.
std::unique_ptr<Env> NewPosixEnv(const std::string& directory);

// Reads one request after the other through File::Read: for Envs that have no device.
std::unique_ptr<BatchReader> NewSerialReader();
// Reads through File::Read, by at most kMostPreadThreads threads for each device.
inline constexpr unsigned kMostPreadThreads = 32;
std::unique_ptr<BatchReader> NewPreadReader(unsigned queue_depth, unsigned devices);

}  // namespace tierstore
