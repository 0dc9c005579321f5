/* Threads and processes (thread.h). */
#include "handles/thread.h"

#include "parts.h"

unsigned int rp_process = 1;
unsigned int rp_sleeping;

RP_THREAD_LOCAL struct rp_thread *rp_current;
static _Thread_local struct rp_thread its_own;

struct rp_thread *rp_init_thread(void)
{
	static uint32_t threads;

	if (!its_own.mark)
		its_own.mark = (uint64_t)rp_process << 32 |
			       __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
	return rp_current = &its_own;
}

void rp_stand_for(struct rp_thread *thread)
{
	rp_current = thread;
}

static void after_fork(void)
{
	struct rp_thread *me = rp_thread();

	rp_process++;
	rp_sleeping = 0;
	/* Everything else belongs to the parent process. */
	*me = (struct rp_thread){ .mark = (uint64_t)rp_process << 32 | (uint32_t)me->mark };
	its_own.mark = me->mark;
}

int rp_refuse_call(void)
{
	rp_leave_call();
	PyErr_Format(PyExc_RecursionError,
		     "maximum recursion depth exceeded: %d calls of rdmapost in each other", MAX_CALLS);
	return -1;
}

int rp_add_threads(void)
{
	return pthread_atfork(NULL, NULL, after_fork) ? -1 : 0;
}
