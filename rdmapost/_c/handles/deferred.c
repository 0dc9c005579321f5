/*
 * The end of a handle's use, and the closes that have no caller to raise to: those of unreachable
 * handles, those that wait for this thread's verb to end, and those that the main thread retries.
 */
#include "handles/internal.h"

enum {
	RETRIES_NS = 500000000, /* how long a close handed to the main thread is retried */
	HELD_NS = 500000000, /* how long a queue pair waits for its windows */
};

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
	 * In the middle of rp_run_deferred(), a close that fails would be deferred again. Leave the
	 * handles for later: rp_run_deferred() ends with rp_ask_main().
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
		if (h->process == rp_process && !is_done(h) &&
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
