/* Closing a handle when there is a caller to raise to; deferred.c has the other closes. */
#include "handles/internal.h"

enum { LONGEST_PAUSE_US = 1000, WAIT_AT_EXIT_US = 1000000 };

/* Call a method that may raise; 0, or -1 with an exception. */
static int ask(struct rp_handle *h, const char *method)
{
	PyObject *done = PyObject_CallMethod((PyObject *)h, method, NULL);

	Py_XDECREF(done);
	return done ? 0 : -1;
}

int rp_await_others(const struct rp_handle *h, struct rp_pause *pause)
{
	struct timespec time = { 0, pause->us * 1000 };

	if (rp_exiting && (pause->all_us += pause->us) > WAIT_AT_EXIT_US)
		return 1;
	Py_BEGIN_ALLOW_THREADS
	nanosleep(&time, NULL);
	Py_END_ALLOW_THREADS
	if (pause->us < LONGEST_PAUSE_US)
		pause->us *= 2;
	return PyErr_CheckSignals() ? -1 : h->process != rp_process;
}

/* Become the handle's closer, if it has none. */
static int claim(struct rp_handle *h)
{
	struct rp_thread *me = rp_thread();
	uintptr_t nobody = 0;

	if (!__atomic_compare_exchange_n(&h->closer, &nobody, this_thread(), 0, __ATOMIC_SEQ_CST,
					 __ATOMIC_SEQ_CST))
		return 0;
	h->outer = me->closing;
	me->closing = h;
	return 1;
}

void rp_end_claim(struct rp_handle *h)
{
	rp_thread()->closing = h->outer;
	__atomic_store_n(&h->closer, 0, __ATOMIC_SEQ_CST);
}

/*
 * For every handle that this thread is closing, record whether the thread is waiting for another
 * thread's close.
 */
static void set_stalled(char stalled)
{
	for (struct rp_handle *h = rp_thread()->closing; h; h = h->outer)
		__atomic_store_n(&h->stalled, stalled, __ATOMIC_SEQ_CST);
}

/*
 * Become the handle's closer, waiting for any other to finish. To avoid a deadlock, a thread in the
 * middle of a close leaves the handle to its closer if that closer is itself waiting.
 */
static int claim_in_turn(struct rp_handle *h, struct rp_pause *pause)
{
	int stopped = 0;

	if (claim(h))
		return 0;
	RP_ADD(&h->claimants, 1);
	while (!stopped && !claim(h)) {
		set_stalled(1);
		if (is_closer(h) ||
		    (rp_thread()->closing && __atomic_load_n(&h->stalled, __ATOMIC_SEQ_CST)))
			stopped = 1;
		else
			stopped = rp_await_others(h, pause);
	}
	set_stalled(0);
	RP_ADD(&h->claimants, -1);
	return stopped;
}

void rp_yield_claim(const struct rp_handle *h)
{
	struct timespec time = { 0, 2 * LONGEST_PAUSE_US * 1000L };

	if (!RP_LOAD(&h->claimants))
		return;
	Py_BEGIN_ALLOW_THREADS
	nanosleep(&time, NULL);
	Py_END_ALLOW_THREADS
}

void rp_count_ended(PyObject *parents, size_t counter)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(parents); i++)
		RP_ADD((unsigned int *)(void *)((char *)PyTuple_GetItem(parents, i) + counter), 1);
}

/*
 * Raise InUseError for a handle's children, or close those that nothing refers to. If no child is
 * listed, another thread may be finishing the close of one: wait for that thread. Returns 0 if the
 * number of children may have changed since `destroyed` was read; 1 if time is up; -1 with an
 * exception.
 */
static int refuse_children(struct rp_handle *h, struct rp_pause *pause, unsigned int destroyed)
{
	PyObject *closed = PyObject_CallMethod((PyObject *)h, "_refuse_children", NULL);
	int unnamed = closed == Py_False;

	Py_XDECREF(closed);
	if (!unnamed)
		return closed ? 0 : -1;
	/* Not in the middle of a close: the children's closer may be waiting for that close. */
	if (!rp_thread()->closing &&
	    (RP_LOAD(&h->destroyed) != destroyed || RP_LOAD(&h->finished) != destroyed))
		return rp_await_others(h, pause);
	PyErr_Format(rp_errors.in_use,
		     "%S cannot be closed: a resource on it is being created or closed", h);
	return -1;
}

int rp_shut(struct rp_handle *h, struct rp_pause *pause)
{
	unsigned int destroyed;
	int stopped;
	uint64_t word;

again:
	stopped = claim_in_turn(h, pause);
	if (stopped)
		return stopped;
	destroyed = RP_LOAD(&h->destroyed);
	word = load(&h->word);
	while (state_of(h) == OPEN && !CHILDREN(word) &&
	       !__atomic_compare_exchange_n(&h->word, &word, word | RP_SHUT, 0, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST))
		;
	if (state_of(h) == GONE || (state_of(h) == OPEN && CHILDREN(word))) {
		rp_end_claim(h);
		if (state_of(h) == GONE)
			return 1;
		stopped = refuse_children(h, pause, destroyed);
		if (stopped)
			return stopped;
		goto again;
	}
	return 0;
}

/* Do everything that precedes destruction; 0, -1 with an exception, or 1 if time is up. */
static int release(struct rp_handle *h, struct rp_pause *pause)
{
	/* Wake threads that wait on the handle: all its verbs, including theirs, must end first. */
	if (ask(h, "_wake"))
		return -1;
	while (VERBS(load(&h->word))) {
		int stopped = rp_await_others(h, pause);

		if (stopped)
			return stopped;
	}
	h->releasing = 1;
	if (ask(h, "_release"))
		return -1;
	/* _refuse_posted raises, or closes the queues that were only waiting to be closed. */
	while (load(&h->posted)) {
		if (!ask(h, "_refuse_posted"))
			continue;
		/* The last completion may have arrived since. */
		if (load(&h->posted) || !PyErr_ExceptionMatches(rp_errors.in_use))
			return -1;
		PyErr_Clear();
	}
	h->releasing = 0;
	return 0;
}

/* Whether a call succeeded. Its result is 0, an errno, a negative errno, or -1 with errno set. */
static int succeeded(PyObject *function, PyObject *result)
{
	long code;

	if (!result)
		return 0;
	code = result == Py_None ? 0 : PyLong_AsLong(result);
	if (!code)
		return 1;
	if (!PyErr_Occurred())
		rp_raise_failed(function, code);
	return 0;
}

static int destroy(struct rp_handle *h)
{
	struct rp_use use;
	PyObject *result;
	int done;

	rp_push_use(rp_thread(), h, &use);
	result = PyObject_CallFunctionObjArgs(h->destroy, h->cdata, NULL);
	done = succeeded(h->destroy, result);
	/* No Python code has run since the call succeeded. */
	if (done) {
		h->address = NULL;
		h->kept = 0;
		rp_count_ended(h->parents, offsetof(struct rp_handle, destroyed));
		set_state(h, DESTROYED);
		rp_unlist(h);
	}
	h->refused = !done;
	Py_XDECREF(result);
	rp_pop_use(rp_thread(), &use);
	return done ? 0 : -1;
}

int rp_insist(struct rp_handle *h, const char *method, struct rp_error *raised)
{
	struct rp_error first = { NULL, NULL, NULL };
	PyObject *done = NULL;

	/* In a child that a signal handler has forked, the call may never complete: try it once. */
	for (int i = 0; !done && i < MAX_INTERRUPTS && (!i || h->process == rp_process); i++) {
		done = PyObject_CallMethod((PyObject *)h, method, NULL);
		if (!first.type)
			first = rp_save_error();
		PyErr_Clear();
	}
	/* A later attempt had enough memory or stack: drop the exception. */
	if (done && first.type && rp_lacks_room(first.type)) {
		rp_restore_error(first);
		PyErr_Clear();
		first = rp_save_error();
	}
	*raised = first;
	Py_XDECREF(done);
	return done != NULL;
}

void rp_unbind(struct rp_bound *bound)
{
	while (bound) {
		struct rp_bound *next = bound->next;

		RP_ADD(&bound->mr->windows, -1);
		RP_ADD(&bound->bind.binder->windows, -1);
		rp_user_left(bound->mr);
		Py_DECREF((PyObject *)bound->mr);
		rp_drop_binder(bound->bind.binder);
		PyMem_Free(bound);
		bound = next;
	}
}

void rp_drop_held(struct rp_handle *h, char state)
{
	PyObject *held[] = { h->cdata, h->destroy, h->parents, h->keeps, NULL, NULL };
	struct rp_error error = rp_save_error();
	struct rp_use use;
	struct rp_bound *bound;

	RP_BEGIN(h);
	bound = h->bound;
	h->bound = NULL;
	h->cdata = h->destroy = h->parents = h->keeps = NULL;
	if (state != DESTROYED) {
		held[4] = h->form;
		held[5] = h->replaced;
		h->form = h->replaced = NULL;
	}
	RP_END();
	set_state(h, state);
	/* Handles that this leaves unreferenced are closed when the use is popped. */
	rp_push_use(rp_thread(), h, &use);
	rp_unbind(bound);
	for (size_t i = 0; i < sizeof(held) / sizeof(held[0]); i++)
		Py_XDECREF(held[i]);
	rp_pop_use(rp_thread(), &use);
	rp_restore_error(error);
}

/*
 * Call _forget(), then release every reference. An exception does not stop this, and stays set; if
 * _forget() did not succeed, the next close() does this again.
 */
static void finish(struct rp_handle *h)
{
	struct rp_error first;
	int forgotten = rp_insist(h, "_forget", &first);

	if (h->queues)
		h->forget(h->queues);
	if (h->parents) {
		rp_leave_parents(h->parents, PyTuple_Size(h->parents));
		rp_count_ended(h->parents, offsetof(struct rp_handle, finished));
	}
	rp_drop_held(h, forgotten ? GONE : DESTROYED);
	rp_restore_error(first);
}

void rp_reopen(struct rp_handle *h)
{
	if (!h->spoiled)
		__atomic_and_fetch(&h->word, ~RP_SHUT, __ATOMIC_SEQ_CST);
}

int rp_close_now(struct rp_handle *h)
{
	struct rp_pause pause = { 1, 0 };
	int stopped;

	rp_ask_main();
	stopped = rp_shut(h, &pause);
	if (stopped)
		return stopped < 0 ? -1 : 0;
	h->refused = 0;
	if (state_of(h) == OPEN)
		stopped = release(h, &pause) || h->process != rp_process || destroy(h);
	if (!stopped)
		finish(h);
	h->releasing = 0;
	if (stopped)
		rp_reopen(h);
	rp_end_claim(h);
	if (!rp_thread()->closing)
		rp_run_deferred_if_idle(rp_thread());
	/* Interrupted, and no user is left to try again: defer the close. */
	if (stopped && h->abandoned && !h->refused && !rp_is_busy(h) && !rp_thread()->draining)
		rp_defer_close(h, BY_FINALIZER);
	/* After a fork in the middle of the close, there is nothing to close here. */
	if (h->process != rp_process && PyErr_ExceptionMatches(rp_errors.error))
		PyErr_Clear();
	return PyErr_Occurred() ? -1 : 0;
}

PyObject *rp_close_handle(PyObject *self, PyObject *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	int failed = 0;

	(void)unused;
	Py_INCREF(self);
	if (is_done(h) || rp_exiting == RP_CLOSED_ALL)
		;
	else if (rp_in_verb())
		rp_defer_close(h, BY_CALLER);
	else
		failed = rp_close_now(h);
	Py_DECREF(self);
	return failed ? NULL : Py_NewRef(Py_None);
}
