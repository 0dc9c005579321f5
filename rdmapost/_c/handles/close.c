/*
 * Closing a handle: when there is a caller to raise to; and, in the second half, the end of a
 * handle's use, and the closes that have no such caller: those of unreachable handles, those that
 * wait for this thread's verb to end, and those that the main thread retries. A close ends uses,
 * and the end of a use may close.
 */
#include "handles/internal.h"

enum {
	LONGEST_PAUSE_US = 1000,
	WAIT_AT_EXIT_US = 1000000,
	RETRIES_NS = 500000000, /* how long a close handed to the main thread is retried */
	HELD_NS = 500000000, /* how long a queue pair waits for its windows */
};

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
 * middle of a close leaves the handle to its closer if that closer is itself waiting. (It may be
 * this thread, which has just been recorded as waiting.)
 */
static int claim_in_turn(struct rp_handle *h, struct rp_pause *pause)
{
	int stopped = 0;

	if (claim(h))
		return 0;
	RP_ADD(&h->claimants, 1);
	while (!stopped && !claim(h)) {
		set_stalled(1);
		if (rp_thread()->closing && __atomic_load_n(&h->stalled, __ATOMIC_SEQ_CST))
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
 * number of children may have changed since `destroyed` and `finished` were read; 1 if time is up;
 * -1 with an exception.
 */
static int refuse_children(struct rp_handle *h, struct rp_pause *pause, unsigned int destroyed,
			   unsigned int finished)
{
	PyObject *closed = PyObject_CallMethod((PyObject *)h, "_refuse_children", NULL);
	int unnamed = closed == Py_False;

	Py_XDECREF(closed);
	if (!unnamed)
		return closed ? 0 : -1;
	if (RP_LOAD(&h->finished) != finished)
		return 0;
	/* Not in the middle of a close: the children's closer may be waiting for that close. */
	if (!rp_thread()->closing &&
	    (RP_LOAD(&h->destroyed) != destroyed || finished != destroyed))
		return rp_await_others(h, pause);
	PyErr_Format(rp_errors.in_use,
		     "%S cannot be closed: a resource on it is being created or closed", h);
	return -1;
}

int rp_shut(struct rp_handle *h, struct rp_pause *pause, char remaking)
{
	unsigned int destroyed, finished;
	int stopped;
	uint64_t word;

again:
	stopped = claim_in_turn(h, pause);
	if (stopped)
		return stopped;
	h->remaking = remaking;
	finished = RP_LOAD(&h->finished);
	destroyed = RP_LOAD(&h->destroyed);
	word = load(&h->word);
	while (state_of(h) == OPEN && !CHILDREN(word) &&
	       !__atomic_compare_exchange_n(&h->word, &word, word | RP_SHUT, 0, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST))
		;
	if (state_of(h) == GONE || (state_of(h) == OPEN && CHILDREN(word))) {
		h->remaking = 0;
		rp_end_claim(h);
		if (state_of(h) == GONE)
			return 1;
		stopped = refuse_children(h, pause, destroyed, finished);
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
	stopped = rp_shut(h, &pause, 0);
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
	/* Interrupted, and no user is left to try again: defer the close. */
	if (failed && h->abandoned && !h->refused && !rp_is_busy(h) && !rp_thread()->draining)
		rp_defer_close(h, BY_FINALIZER);
	Py_DECREF(self);
	return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- closes without a caller --------------------------------------------- */

void rp_defer_close(struct rp_handle *h, char who)
{
	if (__atomic_exchange_n(&h->deferred_by, who, __ATOMIC_SEQ_CST))
		return;
	Py_INCREF((PyObject *)h);
	h->next = NULL;
	if (rp_thread()->last_deferred)
		rp_thread()->last_deferred->next = h;
	else
		rp_thread()->first_deferred = h;
	rp_thread()->last_deferred = h;
}

/* Close an unreachable handle that nothing uses, now or later. */
static void close_abandoned(struct rp_handle *h)
{
	if (rp_exiting == RP_CLOSED_ALL || is_done(h) ||
	    (state_of(h) == OPEN && !rp_is_open(h) && !h->spoiled) || rp_is_busy(h))
		return;
	if (rp_thread()->top)
		rp_defer_close(h, BY_FINALIZER);
	else
		rp_close_quietly(h);
}

/*
 * The device refused to destroy a handle's struct: keep the handle, its memory and its parents
 * until the process ends.
 */
static void keep(struct rp_handle *h)
{
	struct rp_error error = rp_save_error();
	PyObject *said;

	if (!__atomic_exchange_n(&h->kept, 1, __ATOMIC_SEQ_CST)) {
		if (rp_list_as(h, (PyObject *)h))
			Py_INCREF((PyObject *)h);
		PyErr_Clear();
		said = PyObject_CallMethod((PyObject *)h, "_warn_kept", "O",
					   error.value ? error.value : Py_None);
		if (!said)
			PyErr_WriteUnraisable((PyObject *)h);
		Py_XDECREF(said);
	}
	rp_restore_error(error);
}

/* Put a handle at the head of a list, whose links are `next`. */
static void push(struct rp_handle **list, struct rp_handle *h, struct rp_handle **next)
{
	*next = RP_LOAD(list);
	while (!__atomic_compare_exchange_n(list, next, h, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
}

/*
 * Handles whose close lacked stack or memory, for the main thread to close; the list holds
 * references.
 *
 * In CPython 3.11, a traced or profiled function repeats its first instruction for as long as a
 * pending call is queued; if such a function runs in a pending call while another is queued, it
 * never ends. So a single pending call closes all handles, and queues no other before it ends.
 */
static struct rp_handle *for_main;
static unsigned int main_asked; /* the process whose pending call is queued or running, or 0 */

static int close_for_main(void *unused);

void rp_ask_main(void)
{
	unsigned int process = rp_process;

	if (RP_LOAD(&for_main) &&
	    __atomic_exchange_n(&main_asked, process, __ATOMIC_SEQ_CST) != process &&
	    Py_AddPendingCall(close_for_main, NULL))
		RP_STORE(&main_asked, 0);
}

/*
 * Whether this thread's functions are traced or profiled, according to sys.gettrace() or
 * sys.getprofile(); true if that cannot be determined. The getter's C function is called directly,
 * because there may be no stack for a Python call.
 */
static int has_hook(const char *getter_name)
{
	PyObject *getter = Py_XNewRef(PySys_GetObject(getter_name)), *hook = NULL;
	int has;

	if (getter && PyCFunction_Check(getter) && PyCFunction_GetFlags(getter) == METH_NOARGS)
		hook = PyCFunction_GetFunction(getter)(PyCFunction_GetSelf(getter), NULL);
	has = hook != Py_None;
	Py_XDECREF(hook);
	Py_XDECREF(getter);
	PyErr_Clear();
	return has;
}

static void push_for_main(struct rp_handle *h)
{
	push(&for_main, h, &h->next_for_main);
}

static int close_for_main(void *unused)
{
	struct rp_handle *h, *next;
	int failed = 0, traced;

	(void)unused;
	/*
	 * In the middle of rp_run_deferred(), memory or stack may be short for as long as that takes.
	 * Leave the handles for later: rp_run_deferred() ends with rp_ask_main().
	 */
	if (rp_thread()->draining) {
		RP_STORE(&main_asked, 0);
		return 0;
	}
	h = __atomic_exchange_n(&for_main, NULL, __ATOMIC_SEQ_CST);
	RP_STORE(&rp_delivery_waits, rp_process);
	for (; h; h = next) {
		next = h->next_for_main;
		if (failed) {
			/* There would not be enough stack or memory for this one, either. */
			push_for_main(h);
			continue;
		}
		RP_STORE(&h->is_for_main, 0);
		close_abandoned(h);
		failed = RP_LOAD(&h->is_for_main);
		Py_DECREF((PyObject *)h);
	}
	/* A traced function that is about to start would call this again and again. */
	traced = RP_LOAD(&for_main) && (has_hook("gettrace") || has_hook("getprofile"));
	RP_STORE(&rp_delivery_waits, 0);
	RP_STORE(&main_asked, 0);
	rp_deliver_soon();
	if (!traced)
		rp_ask_main();
	return 0;
}

/* Leave a close to the main thread; returns 0 if the close has been retried for long enough. */
static int leave_to_main(struct rp_handle *h)
{
	int64_t now = rp_now_ns();

	if (!h->first_try)
		h->first_try = now;
	else if (now - h->first_try > RETRIES_NS)
		return 0;
	if (!__atomic_exchange_n(&h->is_for_main, 1, __ATOMIC_SEQ_CST)) {
		Py_INCREF((PyObject *)h);
		push_for_main(h);
	}
	rp_ask_main();
	return 1;
}

/*
 * Close a handle when there is no caller to raise to; 0, or -1 with an exception. An exception that
 * does not recur on the next attempt came from a signal handler: it is passed to rp_raise_later().
 */
static int close_insistently(struct rp_handle *h)
{
	PyObject *first = NULL;
	int failed = rp_close_now(h), refusals = 0, known = 0;

	for (int i = 1; failed && i < MAX_INTERRUPTS; i++) {
		known = PyErr_ExceptionMatches(rp_errors.error);
		/* An apparent refusal by the device may be a handler's exception: retry. */
		refusals += known && h->refused;
		if (PyErr_ExceptionMatches(PyExc_RecursionError) || refusals > 1 ||
		    (PyErr_ExceptionMatches(rp_errors.in_use) && rp_is_busy(h)))
			break;
		/* An InUseError is stale here: the last user has left the close to this thread. */
		if (PyErr_ExceptionMatches(rp_errors.in_use) || first ||
		    PyErr_ExceptionMatches(PyExc_MemoryError))
			PyErr_Clear();
		else
			first = rp_take_exception();
		failed = rp_close_now(h);
	}
	/* An error that recurs on every attempt comes from the close, not from a signal handler. */
	if (failed && first && (!known || PyErr_GivenExceptionMatches(first, rp_errors.error)))
		Py_CLEAR(first);
	rp_raise_later(first);
	return failed;
}

void rp_close_quietly(struct rp_handle *h)
{
	struct rp_error error = rp_save_error();
	int left, known;

	Py_INCREF((PyObject *)h);
	if (close_insistently(h)) {
		/* Short of stack or memory: retry in the main thread, for RETRIES_NS. */
		left = rp_lacks_room(PyErr_Occurred()) && leave_to_main(h);
		known = PyErr_ExceptionMatches(rp_errors.error);
		/* If the handle is in use again, its last user closes it. */
		if (!left && state_of(h) == OPEN && !rp_is_busy(h))
			keep(h);
		if (!left && !known)
			PyErr_WriteUnraisable((PyObject *)h);
	}
	PyErr_Clear();
	rp_deliver_soon();
	Py_DECREF((PyObject *)h);
	rp_restore_error(error);
}

/* ---- queue pairs that wait for their windows ------------------------------ */

/*
 * A device may take minutes to destroy a queue pair through which a window is bound, and the window
 * may be in the same garbage cycle. So an unreachable queue pair waits here until its windows are
 * closed, for HELD_NS at most; each verb checks this when it ends. The list holds references.
 */
struct rp_handle *rp_held_back;

static void push_held_back(struct rp_handle *h)
{
	push(&rp_held_back, h, &h->behind);
}

static int binds_windows(struct rp_handle *h)
{
	struct rp_binder *binder = RP_LOAD(&h->binder);

	return binder && RP_LOAD(&binder->windows);
}

/* Hold back an unreachable queue pair if necessary; returns whether it is held back now. */
static int hold_back(struct rp_handle *h)
{
	if (!binds_windows(h) || is_done(h) || rp_exiting || RP_LOAD(&h->held_since) ||
	    !rp_list_again(h))
		return 0;
	RP_STORE(&h->held_since, rp_now_ns());
	push_held_back((struct rp_handle *)Py_NewRef((PyObject *)h));
	return 1;
}

/*
 * Close the queue pairs that need not wait any longer; may run arbitrary Python code. A queue pair
 * stays listed while it is being closed, because the close may be interrupted.
 */
static void close_held_back(void)
{
	struct rp_handle *h = __atomic_exchange_n(&rp_held_back, NULL, __ATOMIC_SEQ_CST), *behind;
	int64_t now = h ? rp_now_ns() : 0;

	for (; h; h = behind) {
		behind = h->behind;
		if (!is_done(h) &&
		    (!rp_is_open(h) ||
		     (binds_windows(h) && now - RP_LOAD(&h->held_since) < HELD_NS))) {
			push_held_back(h);
			continue;
		}
		RP_STORE(&h->held_since, 0);
		close_abandoned(h);
		Py_DECREF((PyObject *)h);
	}
}

void rp_finalize_handle(PyObject *self)
{
	struct rp_handle *h = (struct rp_handle *)self;

	__atomic_store_n(&h->abandoned, 1, __ATOMIC_SEQ_CST);
	if (hold_back(h))
		return;
	/*
	 * This close is deferred until this thread's verb ends or the last user leaves. List the
	 * handle, so that a parent finds it if the parent is closed before that.
	 */
	if (state_of(h) == OPEN && (rp_thread()->top || rp_is_busy(h)))
		rp_list_again(h);
	close_abandoned(h);
}

/* ---- the end of a use ----------------------------------------------------- */

void rp_user_left(struct rp_handle *h)
{
	if (__atomic_load_n(&h->abandoned, __ATOMIC_SEQ_CST) && !RP_LOAD(&h->held_since))
		close_abandoned(h);
}

void rp_leave(struct rp_handle *h, uint64_t user)
{
	if (h->process != rp_process)
		return;
	__atomic_sub_fetch(&h->word, user, __ATOMIC_SEQ_CST);
	rp_user_left(h);
}

void rp_leave_parents(PyObject *parents, Py_ssize_t count)
{
	for (Py_ssize_t i = 0; i < count; i++)
		rp_leave((struct rp_handle *)PyTuple_GetItem(parents, i), CHILD);
}

void rp_unpin(struct rp_handle *h)
{
	RP_ADD(&h->posted, -1);
	if (h->process == rp_process)
		rp_user_left(h);
}

void rp_end_use(struct rp_use *use)
{
	rp_end_use_by(rp_thread(), use);
}

void rp_end_uses(struct rp_use *uses, int used)
{
	while (used)
		rp_end_use(&uses[--used]);
}

/* ---- the end of a verb ---------------------------------------------------- */

/* Pop the first handle whose close was deferred; returns a reference, or NULL. */
static struct rp_handle *next_deferred(struct rp_thread *me, char *who)
{
	struct rp_handle *h = me->first_deferred;

	if (!h)
		return NULL;
	me->first_deferred = h->next;
	if (!h->next)
		me->last_deferred = NULL;
	*who = __atomic_exchange_n(&h->deferred_by, NOBODY, __ATOMIC_SEQ_CST);
	return h;
}

static size_t count_deferred(const struct rp_thread *me)
{
	size_t count = 0;

	for (const struct rp_handle *h = me->first_deferred; h; h = h->next)
		count++;
	return count;
}

/*
 * Each deferred close ends in one of three ways: it succeeds; it goes to the end of the list,
 * because the handle is in use or is left to another closer; or it fails, which is reported. A
 * whole round without success ends the loop.
 */
void rp_run_deferred(void)
{
	struct rp_error error = rp_save_error();
	struct rp_thread *me = rp_thread();
	struct rp_handle *h;
	size_t in_use = 0; /* refusals since the last close that succeeded */
	int gives_up = 0, failed, left;
	char who;

	me->draining = 1;
	close_held_back();
	while (!gives_up && (h = next_deferred(me, &who))) {
		failed = 0;
		if (who == BY_FINALIZER)
			close_abandoned(h);
		else if (!is_done(h))
			failed = close_insistently(h);
		/* The handle is left to a close in progress, which may be interrupted. */
		left = who == BY_CALLER && !failed && !is_done(h);
		if (!failed && !left) {
			in_use = 0;
		} else if (left || (rp_is_busy(h) && (me->closing || in_use <= count_deferred(me)))) {
			/* A handle that this thread is closing may use it: retry later. */
			gives_up = in_use++ > count_deferred(me);
			PyErr_Clear();
			rp_defer_close(h, BY_CALLER);
		} else {
			PyErr_WriteUnraisable((PyObject *)h);
		}
		if (!RP_LOAD(&h->deferred_by))
			RP_STORE(&h->emptied, 0);
		Py_DECREF((PyObject *)h);
	}
	/* This may have closed windows that held-back queue pairs are waiting for. */
	if (RP_LOAD(&rp_held_back))
		close_held_back();
	me->draining = 0;
	rp_ask_main();
	rp_deliver_soon();
	rp_restore_error(error);
}
