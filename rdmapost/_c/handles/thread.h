/*
 * Threads and processes: which one owns a lock or uses a handle, and what forks leave behind.
 */
#ifndef RDMAPOST_THREAD_H
#define RDMAPOST_THREAD_H

#include "base.h"

struct rp_handle;
struct rp_use;

/* The process's generation, counted from 1; a forked child has the next number. */
RP_SHARED unsigned int rp_process;
/* How many threads of this process are sleeping until a descriptor is readable. */
RP_SHARED unsigned int rp_sleeping;

/*
 * A thread's identity, the handles its verbs use, and those to close when its outermost verb ends.
 * rp_stand_for() lets the calling thread act for a thread that waits for it: the caller then owns
 * the waiting thread's locks and is in the middle of that thread's verbs. rp_stand_for(NULL) ends
 * that.
 */
struct rp_thread {
	uint64_t mark; /* high half: rp_process; low half: the thread's number */
	struct rp_use *top;
	struct rp_handle *closing; /* the innermost handle it is closing */
	struct rp_handle *first_deferred, *last_deferred;
	int draining;
	int making; /* how many constructors it is in */
	int calls; /* see rp_enter_call() */
	int lacks_stack; /* its last verb lacked stack for work: it cannot wait for that work */
};

/* glibc reserves some static TLS for libraries loaded by dlopen(); musl does not. */
#ifdef __GLIBC__
#define RP_THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec")))
#else
#define RP_THREAD_LOCAL _Thread_local
#endif
extern RP_THREAD_LOCAL struct rp_thread *rp_current; /* NULL until rp_init_thread() */
/* Give the calling thread its identity. */
struct rp_thread *rp_init_thread(void);
void rp_stand_for(struct rp_thread *thread);

static inline struct rp_thread *rp_thread(void)
{
	struct rp_thread *me = rp_current;

	return me ? me : rp_init_thread();
}

/*
 * Begin a call that may run the caller's code with much of the C stack in use; 0, or -1 with a
 * RecursionError. Python's own limit is too high for that: 3.13 allows 10000 calls of C functions.
 */
enum { MAX_CALLS = 50 };

int rp_refuse_call(void);

static inline int rp_enter_call(void)
{
	return rp_thread()->calls++ < MAX_CALLS ? 0 : rp_refuse_call();
}

static inline void rp_leave_call(void)
{
	rp_thread()->calls--;
}

#endif
