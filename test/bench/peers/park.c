// Lets the thread that calls kt-kernel sleep while kt-kernel's own workers compute.
//
// kt-kernel's caller waits awake for its workers. With as many workers as cores it takes their place: a call then lasts
// multiples of a scheduler slice. A signal puts the caller to sleep until shortly before the call is expected to end.
// Then it waits awake as ever for a look, and naps and looks in turns if that was not enough.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

enum { kStart = 50000 };  // ns; by then the call has handed its work to the workers

static timer_t timer;
static volatile int64_t wake_at, look, nap;
static volatile int sleeps;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static struct timespec spec(int64_t ns) { return (struct timespec){ns / 1000000000, ns % 1000000000}; }

static void fire_in(int64_t ns) {
  const struct itimerspec when = {{0, 0}, spec(ns)};
  timer_settime(timer, 0, &when, NULL);
}

static void asleep(int number) {
  (void)number;
  const int kept = errno;
  ++sleeps;
  const int64_t now = now_ns();
  const struct timespec until = spec(wake_at > now ? wake_at : now + nap);
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
  fire_in(look);
  errno = kept;
}

// Prepares the calling thread; 0 or an errno.
int park_open(void) {
  struct sigaction action;
  struct sigevent event;
  memset(&action, 0, sizeof action);
  memset(&event, 0, sizeof event);
  action.sa_handler = asleep;
  action.sa_flags = SA_RESTART;
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGRTMIN + 3;
  event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  if (sigaction(event.sigev_signo, &action, NULL) != 0 || timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return errno;
  return 0;
}

// The call that starts now: sleep for `asleep_for` ns, then look for `look_for` and nap for `nap_for` in turns.
void park_begin(int64_t asleep_for, int64_t look_for, int64_t nap_for) {
  wake_at = now_ns() + asleep_for;
  look = look_for;
  nap = nap_for;
  sleeps = 0;
  fire_in(kStart);
}

// The call has ended; how often the caller slept or napped.
int park_end(void) {
  fire_in(0);
  return sleeps;
}
