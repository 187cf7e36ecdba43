// Calls of glibc as of 2.28, the oldest one that wheels run with, in a library that is linked with a newer one.
//
// glibc 2.34 moved libdl and libpthread into libc and gave their functions a new version, which the linker takes.
// CMakeLists.txt links with --wrap: calls, also those of the static libstdc++, come here and go on to the old version.
#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

#define SD_ORT_HIDDEN __attribute__((visibility("hidden")))

// Jumps, so that dlopen sees its caller and an exception leaves pthread_once past no frame of ours.
#define SD_ORT_OLD_VERSION(function, version)               \
  asm(".symver old_" #function ", " #function "@" version); \
  extern "C" SD_ORT_HIDDEN __attribute__((naked)) void __wrap_##function() { asm("jmp old_" #function "@PLT"); }

SD_ORT_OLD_VERSION(dladdr, "GLIBC_2.2.5")
SD_ORT_OLD_VERSION(dlerror, "GLIBC_2.2.5")
SD_ORT_OLD_VERSION(dlinfo, "GLIBC_2.3.3")
SD_ORT_OLD_VERSION(dlopen, "GLIBC_2.2.5")
SD_ORT_OLD_VERSION(dlsym, "GLIBC_2.2.5")
SD_ORT_OLD_VERSION(pthread_create, "GLIBC_2.2.5")
SD_ORT_OLD_VERSION(pthread_join, "GLIBC_2.2.5")
SD_ORT_OLD_VERSION(pthread_once, "GLIBC_2.2.5")

extern "C" {

// A variable of 2.32, which libstdc++ reads to count references without atomics.
SD_ORT_HIDDEN char __libc_single_threaded = 0;

// A function of 2.33. Before, programs called one with the version of the struct.
asm(".symver old_fxstat64, __fxstat64@GLIBC_2.2.5");
int old_fxstat64(int version, int file, struct stat64* to);
SD_ORT_HIDDEN int __wrap_fstat64(int file, struct stat64* to) { return old_fxstat64(1, file, to); }

// A function of 2.30: waits until a time of a clock of the caller's choice. Older ones take CLOCK_REALTIME; libstdc++
// waits again if that clock was set forward.
SD_ORT_HIDDEN int __wrap_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                                const timespec* until) {
  constexpr long kSecond = 1000000000;
  timespec now, end;
  if (clock_gettime(clock, &now) != 0) return EINVAL;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += until->tv_sec - now.tv_sec;
  end.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (end.tv_nsec < 0) {
    end.tv_nsec += kSecond;
    --end.tv_sec;
  } else if (end.tv_nsec >= kSecond) {
    end.tv_nsec -= kSecond;
    ++end.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &end);
}

}  // extern "C"
