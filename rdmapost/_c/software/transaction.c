/*
 * Transactions of the soft device, which run under its lock.
 *
 * A control verb is one transaction: if its Python function raises, the exception propagates and
 * nothing has changed. The work that data verbs start also runs as transactions, one for each work
 * request; there, an exception comes either from a signal handler, and the transaction is retried,
 * or from a bug in the device. A retry on another thread shows which, because handlers run only in
 * the main thread.
 */
#include "software/internal.h"

#include <time.h>

static int64_t due = -1; /* when work is due, in ns of the monotonic clock; -1 is never */
static int64_t again = -1; /* when work that lacked memory is tried again; see `due` */
static int broken; /* a bug in the device, or a lack of memory, must be reported */
static int forked; /* the state is still the parent process's */
static int doomed; /* the running verb began in another process */
static int64_t late; /* when the verb in progress begins to leave work to later verbs, or 0 */
static int64_t wasted; /* how many ns this verb has spent on work that lacked memory */
static int lacked_memory; /* something is left to a later verb, which must be started */
static Py_ssize_t aside; /* how many objects at the head of READY wait for memory until `again` */
static PyObject *at_work; /* the READY object whose work runs; other verbs need not wait for it */
static int gc_paused; /* pause_gc() has disabled the collector, which was enabled */
static PyObject *start_new_thread; /* _thread's, or NULL if that has been replaced */
static PyObject *is_finalizing; /* of sys; while it returns True, a new thread may never run */
static PyObject *elsewhere; /* run_elsewhere() */
static PyObject *nothing, *globals; /* code that does nothing, and its globals */

/*
 * The longest time until work that failed for lack of memory, or because of a bug, is tried again.
 */
enum { LONGEST_PAUSE_NS = 200000000 };

/* ---- transactions -------------------------------------------------------- */

struct errand {
	PyObject *call;
	PyObject *result; /* NULL: the work is left to a later verb */
	PyObject *error; /* the first attempt's exception, or NULL if there was no memory for one */
	PyObject *bug; /* type of the exception passed to GIVE_UP; if set, `result` is GIVE_UP's */
	int ran; /* on the separate thread */
	PyThread_type_lock done;
	struct rp_thread *sender;
};

/*
 * Repeat the call until its commit succeeds. Each repetition refuses the memory where writes have
 * failed.
 */
static PyObject *attempt(PyObject *call)
{
	PyObject *result;
	int failed, commits = 0;

	for (;;) {
		rp_journal_begin();
		result = rp_call(call);
		if (!result || doomed)
			break;
		failed = rp_journal_commit();
		if (!failed)
			return result;
		rp_journal_rollback();
		Py_DECREF(result);
		if (failed == -2 || ++commits > RP_MAX_REFUSED)
			rp_soft_refuse_writes();
		if (!PyErr_ExceptionMatches(PyExc_OSError))
			return NULL;
		PyErr_Clear();
	}
	rp_journal_rollback();
	return result;
}

/*
 * Have the device fail an object's work or, for None, log the error. Returns NULL, perhaps with an
 * exception set, if that is impossible now.
 */
static PyObject *give_up(PyObject *object, PyObject *error)
{
	PyObject *result = NULL, *call;

	broken = 1;
	call = PyTuple_Pack(3, rp_soft_given(GIVE_UP), object, error ? error : Py_None);
	if (call)
		result = attempt(call);
	Py_XDECREF(call);
	return result;
}

static int lacks_stack(PyObject *error)
{
	return PyErr_GivenExceptionMatches(error, PyExc_RecursionError);
}

/* Whether an attempt failed for lack of memory, perhaps even for an exception. */
static int lacks_memory(PyObject *error)
{
	return !error || (rp_lacks_room(error) && !lacks_stack(error));
}

/* The object whose work the errand does, or None. */
static PyObject *object_of_errand(const struct errand *errand)
{
	return PyTuple_Size(errand->call) > 1 ? PyTuple_GetItem(errand->call, 1) : Py_None;
}

/* Whether two attempts, between which a signal handler may run, failed because of a bug. */
static int is_bug(PyObject *first, PyObject *second)
{
	return first && second && Py_TYPE(first) == Py_TYPE(second) && !lacks_stack(second) &&
	       PyErr_GivenExceptionMatches(second, PyExc_Exception);
}

/*
 * Retry, and give up if that fails, too. `here` says whether signal handlers may run; if not, any
 * exception other than MemoryError is a bug in the device.
 */
static void attempt_again(struct errand *errand, int here)
{
	PyObject *error = NULL, *second;

	errand->result = attempt(errand->call);
	if (errand->result)
		return;
	error = rp_take_exception();
	if (lacks_memory(error) && !lacks_memory(errand->error)) {
		/* Only one of the two attempts lacked memory. */
		Py_XDECREF(error);
		errand->result = attempt(errand->call);
		if (errand->result)
			return;
		error = rp_take_exception();
	}
	if (!here || lacks_memory(error) || is_bug(errand->error, error)) {
		errand->bug = Py_NewRef(error ? (PyObject *)Py_TYPE(error) : Py_None);
		errand->result = give_up(object_of_errand(errand), error);
		second = rp_take_exception();
		if (second && (here ? is_bug(error, second) : !rp_lacks_room(second))) {
			/* GIVE_UP has a bug, too: report it, and retry only at long intervals. */
			Py_XDECREF(give_up(Py_None, second));
			wasted += LONGEST_PAUSE_NS;
			Py_DECREF(second);
			second = rp_take_exception();
		}
		Py_XDECREF(error);
		error = second;
	}
	if (here && lacks_stack(error))
		rp_thread()->lacks_stack = 1;
	if (here && error && !rp_lacks_room(error))
		rp_raise_later(error);
	else
		Py_XDECREF(error);
}

/* Retry in this thread if it has enough stack left; otherwise leave the work to a later verb. */
static void attempt_here(struct errand *errand)
{
	if (lacks_stack(errand->error))
		rp_thread()->lacks_stack = 1;
	else
		attempt_again(errand, 1);
}

static void resume_gc(void)
{
	if (gc_paused)
		PyGC_Enable();
	gc_paused = 0;
}

/*
 * Pause the collector: in the separate thread, finalizers would wait for locks held by the sender.
 * In CPython 3.12 a collection that is due takes place nevertheless, when a thread next runs Python
 * code; have this thread do so. Returns 0 if it has no stack for that.
 */
static int pause_gc(void)
{
	int collected = Py_Version >> 16 != 0x030c;

	gc_paused = PyGC_IsEnabled();
	PyGC_Disable();
	for (int i = 0; !collected && i < MAX_INTERRUPTS; i++) {
		PyObject *result = PyEval_EvalCode(nothing, globals, globals);

		if (!result)
			rp_handler_raised();
		collected = result != NULL;
		Py_XDECREF(result);
	}
	return collected;
}

/*
 * Take the errand out of its capsule, the separate thread's argument; NULL if it has already been
 * taken. Only one of these takes it: the thread, to run it; or the sender or the capsule's
 * destructor, to cancel it.
 */
static struct errand *take_errand(PyObject *capsule)
{
	struct errand **at = PyCapsule_GetPointer(capsule, NULL);

	return at ? __atomic_exchange_n(at, NULL, __ATOMIC_SEQ_CST) : NULL;
}

static void free_errand_ref(PyObject *capsule)
{
	struct errand *errand = take_errand(capsule);

	/* The thread has ended without running the errand. */
	if (errand)
		PyThread_release_lock(errand->done);
	PyMem_Free(PyCapsule_GetPointer(capsule, NULL));
}

/*
 * Drop an exception that was set for this thread (PyThreadState_SetAsyncExc) before it ran: CPython
 * 3.11 gives a new thread what is set for the thread that starts it.
 */
static void drop_exception(void)
{
	Py_XDECREF(PyEval_EvalCode(nothing, globals, globals));
	PyErr_Clear();
}

static PyObject *run_elsewhere(PyObject *self, PyObject *capsule)
{
	struct errand *errand = take_errand(capsule);

	(void)self;
	if (!errand)
		return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
	/* Count as the owner of the waiting sender's locks. */
	rp_stand_for(errand->sender);
	drop_exception();
	attempt_again(errand, 0);
	rp_stand_for(NULL);
	errand->ran = 1;
	PyThread_release_lock(errand->done);
	Py_RETURN_NONE;
}

/* Call a C function even if the stack is so deep that PyObject_Call() raises RecursionError. */
static PyObject *call_directly(PyObject *function, PyObject *arguments)
{
	return PyCFunction_GetFunction(function)(PyCFunction_GetSelf(function), arguments);
}

static PyMethodDef runner = { "run_elsewhere", run_elsewhere, METH_O, NULL };

/*
 * Start a thread for the errand; return 0, or -1 with no exception set. Let Python start it: Python
 * creates the thread's state first, where a lack of memory can still be reported; in the new
 * thread, PyGILState_Ensure() would end the process instead.
 */
static int start_thread(struct errand *errand)
{
	struct errand **errand_ref = PyMem_Malloc(sizeof(*errand_ref));
	PyObject *capsule, *arguments, *call, *thread;

	if (!errand_ref)
		return -1;
	*errand_ref = errand;
	capsule = PyCapsule_New(errand_ref, NULL, free_errand_ref);
	if (!capsule) {
		PyMem_Free(errand_ref);
		PyErr_Clear();
		return -1;
	}
	arguments = PyTuple_Pack(1, capsule);
	call = arguments ? PyTuple_Pack(2, elsewhere, arguments) : NULL;
	thread = call ? call_directly(start_new_thread, call) : NULL;
	Py_XDECREF(call);
	Py_XDECREF(arguments);
	PyErr_Clear();
	/* The thread may run even if no identifier was returned: then it has taken the errand. */
	if (!thread && take_errand(capsule)) {
		Py_DECREF(capsule);
		return -1;
	}
	Py_XDECREF(thread);
	Py_DECREF(capsule);
	return 0;
}

/* Retry the call on a separate thread. Returns whether that was possible. */
static int send(struct errand *errand)
{
	PyObject *ending = start_new_thread ? call_directly(is_finalizing, NULL) : NULL;
	int may_start = ending == Py_False;

	Py_XDECREF(ending);
	PyErr_Clear();
	if (!may_start)
		return 0;
	errand->sender = rp_thread();
	errand->done = PyThread_allocate_lock();
	if (!errand->done)
		return 0;
	PyThread_acquire_lock(errand->done, WAIT_LOCK);
	if (pause_gc() && !doomed && !start_thread(errand)) {
		Py_BEGIN_ALLOW_THREADS
		PyThread_acquire_lock(errand->done, WAIT_LOCK);
		Py_END_ALLOW_THREADS
	}
	resume_gc();
	PyThread_release_lock(errand->done);
	PyThread_free_lock(errand->done);
	return errand->ran;
}

long rp_soft_transact(PyObject *call)
{
	struct errand errand = { .call = call };
	long result_code;

	rp_soft_allow_writes();
	errand.result = attempt(call);
	errand.error = errand.result ? NULL : rp_take_exception();
	if (!errand.result && !doomed && !send(&errand) && !doomed)
		attempt_here(&errand);
	/*
	 * Drop the exception if it came from a bug, because GIVE_UP has received it, or from a lack
	 * of stack or memory, because the work is retried.
	 */
	if (errand.error && !doomed &&
	    ((PyObject *)Py_TYPE(errand.error) == errand.bug || rp_lacks_room(errand.error)))
		Py_CLEAR(errand.error);
	rp_raise_later(errand.error);
	/* Work is done again unless it has been done or has failed. */
	result_code = errand.result ? PyLong_AsLong(errand.result) : -1;
	if (doomed)
		result_code = 0;
	Py_XDECREF(errand.result);
	Py_XDECREF(errand.bug);
	PyErr_Clear();
	return result_code;
}

/* How long a verb spends on pending work that can wait: other threads may want the lock. */
enum { SHARE_NS = 2000000 };

/*
 * Whether this verb has used up its share. The first call starts the clock, so every verb does some
 * work.
 */
static int is_late(int64_t now)
{
	if (!late)
		late = now + SHARE_NS;
	return now >= late;
}

/*
 * Do one part of an object's pending work, or the work that is due (None), which must not be late.
 * Returns 1 if there is more, 0 if not, -1 if the work is left to a later verb for lack of memory or
 * stack, or -2 if it is left because this verb has used up its share of time and the device's timer
 * starts another one.
 */
static long work(PyObject *object)
{
	int64_t begin, spent;
	PyObject *call;
	long more;

	if (!rp_soft_run_fast(object))
		return 0;
	begin = rp_now_ns();
	call = PyTuple_Pack(3, rp_soft_given(EXECUTE), object,
			    object != Py_None && is_late(begin) ? Py_True : Py_False);
	more = call ? rp_soft_transact(call) : -1;
	if (more == -1) {
		spent = rp_now_ns() - begin;
		wasted += spent;
		/* Do not charge this to the share of the work that does not lack memory. */
		if (late)
			late += spent;
	}
	Py_XDECREF(call);
	PyErr_Clear();
	return more;
}

/* The time until `when`, at least 1 ns, or 0 if that is never. */
static int64_t time_until(int64_t when)
{
	int64_t left = when - rp_now_ns();

	return when < 0 ? 0 : left > 0 ? left : 1;
}

/* Make a device's timer fire after `ns`, or never if that is 0, but at `again` at the latest. */
static void start_timer(int fd, int64_t ns)
{
	struct itimerspec when = { 0 };
	int64_t left = time_until(RP_LOAD(&again));

	if (left && (!ns || left < ns))
		ns = left;
	when.it_value.tv_sec = ns / 1000000000;
	when.it_value.tv_nsec = ns % 1000000000;
	timerfd_settime(fd, 0, &when, NULL);
}

/*
 * How long after running out of memory the device's timer starts a verb that tries again: longer if
 * such attempts have taken long, so that other work gets most of the time.
 */
enum { TRY_AGAIN_NS = 2000000 };

static int64_t pause_ns(void)
{
	return TRY_AGAIN_NS + (4 * wasted < LONGEST_PAUSE_NS ? 4 * wasted : LONGEST_PAUSE_NS);
}

/*
 * Have a verb soon retry whatever lacked memory: a thread that waits for a device sleeps until the
 * device's timer fires. Needs no memory. run_due() in Python restores the timers.
 */
static void try_again_soon(void)
{
	PyObject *devices = rp_soft_given(DEVICES), *name, *device, *fd;
	Py_ssize_t at = 0;

	/* Do not postpone `again`: verbs may follow each other at shorter intervals. */
	if (RP_LOAD(&again) < 0)
		RP_STORE(&again, rp_now_ns() + pause_ns());
	RP_BEGIN(devices);
	while (PyDict_Next(devices, &at, &name, &device)) {
		fd = PyObject_GetAttr(device, rp_names[TIMER_FD]);
		if (fd)
			start_timer((int)PyLong_AsLong(fd), time_until(RP_LOAD(&due)));
		Py_XDECREF(fd);
		PyErr_Clear();
	}
	RP_END();
}

/* ---- verbs --------------------------------------------------------------- */

static int is_past(int64_t when)
{
	return when >= 0 && rp_now_ns() >= when;
}

static int is_due(void)
{
	return is_past(RP_LOAD(&due)) || is_past(RP_LOAD(&again));
}

/* Return a new reference to a READY object, or NULL past the end. */
static PyObject *ready_at(Py_ssize_t at)
{
	PyObject *list = rp_soft_given(READY), *object = NULL;

	rp_data_lock();
	if (at < PyList_Size(list))
		object = Py_NewRef(PyList_GetItem(list, at));
	rp_data_unlock();
	return object;
}

/* Remove a READY object, to which the caller holds a reference; 0, or 1 if it stays. */
static int take_ready(Py_ssize_t at)
{
	int failed;

	rp_data_lock();
	failed = PyList_SetSlice(rp_soft_given(READY), at, at + 1, NULL);
	rp_data_unlock();
	PyErr_Clear();
	return failed != 0;
}

/* Count how often an object is in READY before an index. The caller holds the data lock. */
static int listed_before(Py_ssize_t end, PyObject *object)
{
	PyObject *ready = rp_soft_given(READY);
	int count = 0;

	for (Py_ssize_t i = 0; i < end; i++)
		count += PyList_GetItem(ready, i) == object;
	return count;
}

/* Exchange two READY objects. Needs no memory. */
static void swap(Py_ssize_t at, Py_ssize_t other)
{
	PyObject *ready = rp_soft_given(READY), *first, *second;

	rp_data_lock();
	first = Py_NewRef(PyList_GetItem(ready, at));
	second = Py_NewRef(PyList_GetItem(ready, other));
	PyList_SetItem(ready, at, second);
	PyList_SetItem(ready, other, first);
	rp_data_unlock();
}

/*
 * Have an object that lacks memory wait until `again`, so that other work need not wait for it.
 * Needs no memory. Return 0 if it was a duplicate and has been removed from READY, else 1.
 */
static int set_aside(Py_ssize_t at)
{
	int is_listed;

	rp_data_lock();
	is_listed = listed_before(aside, PyList_GetItem(rp_soft_given(READY), at));
	rp_data_unlock();
	if (is_listed)
		return take_ready(at);
	swap(aside, at);
	RP_STORE(&aside, aside + 1);
	return 1;
}

static long work_on(PyObject *object)
{
	long more;

	RP_STORE(&at_work, object);
	do
		more = work(object);
	while (more > 0);
	RP_STORE(&at_work, NULL);
	return more;
}

/*
 * Do the pending work. Return whether any objects stay listed because their work is left to a later
 * verb.
 */
static int carry_on(void)
{
	PyObject *object;
	Py_ssize_t at = aside, begin = aside;
	long more;
	int stays;

	/* Until the device has been reset after a fork, the objects are the parent's. */
	while (!doomed && !forked && (object = ready_at(at))) {
		more = work_on(object);
		if (more == -1)
			lacked_memory = 1;
		/* If this thread lacked stack, another caller's verb may do the work at once. */
		if (more == -1 && !rp_thread()->lacks_stack)
			stays = set_aside(at);
		else
			stays = more < 0 || take_ready(at);
		at += stays;
		Py_DECREF(object);
		if (wasted > SHARE_NS && at < PyList_Size(rp_soft_given(READY))) {
			/* Let others have the lock; another verb goes on at once. */
			RP_STORE(&due, rp_now_ns());
			lacked_memory = 1;
			return 1;
		}
	}
	return at > begin;
}

/* Retry, in turn, what has been set aside. */
static void try_aside(void)
{
	static Py_ssize_t turn;
	int64_t end = rp_now_ns() + SHARE_NS;
	PyObject *object;
	long more;

	for (Py_ssize_t left = aside; left > 0 && !doomed && !forked; left--) {
		turn = turn < aside ? turn : 0;
		object = ready_at(turn);
		more = work_on(object);
		if (more == -1 || (!more && take_ready(turn))) {
			turn++;
		} else {
			RP_STORE(&aside, aside - 1);
			if (more)
				swap(turn, aside);
		}
		Py_DECREF(object);
		if (rp_now_ns() >= end)
			break;
	}
	lacked_memory |= aside > 0;
}

/* Have the devices on a network look for packets, and for timers that have expired. */
static void look_at_wires(void)
{
	PyObject *wires = rp_soft_given(WIRES), *ready = rp_soft_given(READY), *wire;
	int is_deaf = 0;

	rp_data_lock();
	for (Py_ssize_t i = 0; !forked && i < PyList_Size(wires); i++) {
		wire = PyList_GetItem(wires, i);
		if (!listed_before(PyList_Size(ready), wire))
			lacked_memory |= PyList_Append(ready, wire) != 0;
		is_deaf |= listed_before(aside, wire) > 0;
	}
	RP_STORE(&rp_deaf, is_deaf);
	rp_data_unlock();
	PyErr_Clear();
}

/*
 * Acquire the lock, and do the work that is due. After a fork, reset the device first; without
 * memory for that, it stays `forked`, and no work is done. This thread then counts as being in a
 * verb, so that a close by a finalizer or a signal handler is deferred until end_step().
 */
static void enter(struct rp_use *use)
{
	PyObject *call;
	int has_waited, had_bug;
	int64_t when;
	long more;

	rp_push_use(rp_thread(), NULL, use);
	rp_thread()->lacks_stack = 0;
	rp_acquire(&rp_device_lock);
	late = wasted = 0;
	if (forked) {
		rp_journal_forget();
		rp_clear(rp_soft_given(READY));
		RP_STORE(&aside, 0);
		call = PyTuple_Pack(1, rp_soft_given(RESET));
		forked = !call || rp_soft_transact(call) <= 0;
		Py_XDECREF(call);
	}
	/* Run due work only once per verb: a retry may be due again immediately. */
	if (is_due()) {
		when = RP_LOAD(&due);
		has_waited = is_past(RP_LOAD(&again));
		had_bug = broken;
		broken = 0;
		RP_STORE(&due, -1);
		if (has_waited)
			RP_STORE(&again, -1);
		/* If this fails, it is retried at `again`; if the cause is a bug, rarely. */
		more = work(Py_None);
		if (more < 0 || broken)
			lacked_memory = 1;
		/* If this thread lacked stack, another caller's verb may do the work at once. */
		if (more < 0 && rp_thread()->lacks_stack)
			RP_STORE(&due, when);
		if (more >= 0 && broken)
			wasted += LONGEST_PAUSE_NS;
		broken |= had_bug;
		carry_on();
		if (has_waited)
			try_aside();
	}
	look_at_wires();
}

static void pause_thread(long ns)
{
	struct timespec moment = { .tv_nsec = ns };

	Py_BEGIN_ALLOW_THREADS
	nanosleep(&moment, NULL);
	Py_END_ALLOW_THREADS
}

/* Do the work that has become possible, and release the lock. */
static void leave(void)
{
	int left = carry_on(), failed = broken;
	PyObject *done;

	/*
	 * Last, because what was executed in the meantime may have set the timer. In the child of a
	 * fork, the timer is the parent's.
	 */
	if (lacked_memory && !forked)
		try_again_soon();
	lacked_memory = broken = doomed = 0;
	if (!PyList_Size(rp_soft_given(WIRES)))
		RP_STORE(&rp_deaf, 0);
	rp_release(&rp_device_lock);
	/*
	 * Let other threads run. A thread waiting for the lock or the GIL needs time to wake up;
	 * without a pause, this thread would have reacquired both by then, for the work that is left
	 * or for its next verb. If this thread released the GIL only while it held the lock, the
	 * other would never find the lock free.
	 */
	if (left || RP_LOAD(&rp_device_lock.starved))
		pause_thread(100000);
	if (failed) {
		done = PyObject_CallObject(rp_soft_given(LOG), NULL);
		if (!done)
			rp_handler_raised();
		Py_XDECREF(done);
	}
}

/* End what enter() began, after leave(). May run any Python code; an exception stays set. */
static void end_step(const struct rp_use *use)
{
	rp_pop_use(rp_thread(), use);
}

PyObject *rp_soft_progress(void)
{
	struct rp_use use;
	int executing;

	if (rp_soft_busy())
		return NULL;
	rp_thread()->lacks_stack = 0;
	executing = RP_LOAD(&at_work) != NULL;
	if (PyList_Size(rp_soft_given(READY)) > RP_LOAD(&aside) + executing || is_due() ||
	    (PyList_Size(rp_soft_given(WIRES)) && !executing)) {
		enter(&use);
		leave();
		end_step(&use);
	}
	/* Return a control verb's exception, too: a thread waiting in C may never raise it. */
	return rp_deliver();
}

/* The forking thread continues what it was doing; no other threads exist. */
static void after_fork(void)
{
	forked = 1;
	lacked_memory = rp_deaf = 0;
	at_work = NULL;
	due = again = -1;
	rp_free_data_lock();
	doomed = rp_device_lock.owner && (uint32_t)rp_device_lock.owner == (uint32_t)rp_thread()->mark;
	rp_device_lock.owner = doomed ? rp_thread()->mark : 0;
	rp_device_lock.waiting = rp_device_lock.starved = 0;
}

/* Return a new reference to the object with a handle, or NULL without an exception. */
static PyObject *object_of(uint32_t handle)
{
	PyObject *key = PyLong_FromUnsignedLong(handle), *object = NULL, *objects, *value;
	Py_ssize_t at = 0;

	objects = rp_soft_given(OBJECTS);
	if (key) {
		object = rp_dict_get(objects, key);
		Py_DECREF(key);
		return object;
	}
	/* There is no memory for the key, but a poll must not fail as if the CQ were gone. */
	PyErr_Clear();
	RP_BEGIN(objects);
	while (!object && PyDict_Next(objects, &at, &key, &value))
		if (PyLong_AsUnsignedLong(key) == handle)
			object = Py_NewRef(value);
	RP_END();
	return object;
}

PyObject *rp_soft_part(uint32_t handle, enum rp_name name)
{
	/* After a fork, until the device is reset, the objects are the parent's. */
	PyObject *object = forked ? NULL : object_of(handle), *found;

	found = object && name != NAMES ? PyObject_GetAttr(object, rp_names[name]) :
					  Py_XNewRef(object);
	Py_XDECREF(object);
	PyErr_Clear();
	return found;
}

int rp_soft_start(uint32_t handle)
{
	PyObject *object = rp_soft_part(handle, NAMES);
	int failed;

	rp_data_lock();
	/* The object may already be listed: looking costs a post more than a second turn does. */
	failed = !object || PyList_Append(rp_soft_given(READY), object);
	rp_data_unlock();
	PyErr_Clear();
	Py_XDECREF(object);
	return failed ? ENOMEM : 0;
}

/* verb(function, *args): call it as one transaction, which succeeds or raises with no effect. */
static PyObject *verb(PyObject *self, PyObject *call)
{
	struct rp_error error;
	struct rp_use use;
	PyObject *result;

	(void)self;
	if (rp_soft_busy())
		return PyObject_CallObject(rp_soft_given(REFUSE), call);
	enter(&use);
	/* If the device has not been reset after a fork, memory for the reset is lacking. */
	result = forked ? PyErr_NoMemory() : attempt(call);
	/* In a forked child, the device's errors would mislead: its descriptors are closed. */
	if (doomed && (result || PyErr_ExceptionMatches(PyExc_OSError) ||
		       PyErr_ExceptionMatches(PyExc_ValueError) ||
		       PyErr_ExceptionMatches(PyExc_MemoryError) ||
		       PyErr_ExceptionMatches(rp_errors.error))) {
		Py_CLEAR(result);
		rp_raise_forked();
	}
	error = rp_save_error();
	leave();
	rp_deliver_soon();
	rp_restore_error(error);
	end_step(&use);
	return result;
}

/* run_device(): do the device's pending work, as posts and polls do when they hold no lock. */
static PyObject *run_device(PyObject *self, PyObject *unused)
{
	PyObject *raised_now = rp_soft_progress();

	(void)self;
	(void)unused;
	/* Otherwise, the device's thread would be woken again at once. */
	if (RP_LOAD(&rp_deaf))
		pause_thread(1000000);
	if (raised_now)
		rp_raise(raised_now);
	return raised_now ? NULL : Py_NewRef(Py_None);
}

/* sleeping(): how many threads sleep in a wait. */
static PyObject *sleeping(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return PyLong_FromUnsignedLong(RP_LOAD(&rp_sleeping));
}

/*
 * after_fork(): resume the collector if a thread that the child lacks had paused it; needs the GIL.
 */
static PyObject *resume_in_child(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	resume_gc();
	Py_RETURN_NONE;
}

/* schedule_at(seconds): schedule the device to run at that time; called through on_commit(). */
static PyObject *schedule_at(PyObject *self, PyObject *seconds)
{
	double when = PyFloat_AsDouble(seconds);

	(void)self;
	/* One ns more, so that the device does not run too early. */
	RP_STORE(&due, when < 0 ? -1 : (int64_t)(when * 1e9) + 1);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* set_timer(fd, ns), for on_commit: make a timer fire after `ns`; 0 disarms it. */
static PyObject *set_timer(PyObject *self, PyObject *args)
{
	long long ns;
	int fd;

	(void)self;
	if (!PyArg_ParseTuple(args, "iL", &fd, &ns))
		return NULL;
	start_timer(fd, ns);
	Py_RETURN_NONE;
}

/* signal(fd, events), for on_commit: make an eventfd readable if and only if events are queued. */
static PyObject *signal_events(PyObject *self, PyObject *args)
{
	PyObject *events;
	eventfd_t counted;
	int fd;

	(void)self;
	if (!PyArg_ParseTuple(args, "iO", &fd, &events))
		return NULL;
	/* The eventfd is non-blocking. */
	if (PyObject_Size(events) > 0)
		eventfd_write(fd, 1);
	else
		eventfd_read(fd, &counted);
	Py_RETURN_NONE;
}

/* start(object): schedule its pending work, unless it is scheduled; called through on_commit(). */
static PyObject *start(PyObject *self, PyObject *object)
{
	PyObject *ready = rp_soft_given(READY);
	int failed = 0;

	(void)self;
	rp_data_lock();
	/* The object at work will be removed from the list. */
	if (listed_before(PyList_Size(ready), object) <= (object == at_work))
		failed = PyList_Append(ready, object);
	rp_data_unlock();
	return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
	{ "verb", verb, METH_VARARGS, NULL },
	{ "run_device", run_device, METH_NOARGS, NULL },
	{ "sleeping", sleeping, METH_NOARGS, NULL },
	{ "after_fork", resume_in_child, METH_NOARGS, NULL },
	{ "schedule_at", schedule_at, METH_O, NULL },
	{ "set_timer", set_timer, METH_VARARGS, NULL },
	{ "signal", signal_events, METH_VARARGS, NULL },
	{ "start", start, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyObject *attribute_of(const char *module_name, const char *name)
{
	PyObject *module = PyImport_ImportModule(module_name), *found;

	found = module ? PyObject_GetAttrString(module, name) : NULL;
	Py_XDECREF(module);
	return found;
}

static int takes(PyObject *function, int arguments)
{
	return PyCFunction_Check(function) && PyCFunction_GetFlags(function) == arguments;
}

int rp_add_soft_transaction(PyObject *module)
{
	elsewhere = PyCFunction_New(&runner, NULL);
	is_finalizing = attribute_of("sys", "is_finalizing");
	start_new_thread = attribute_of("_thread", "start_new_thread");
	nothing = Py_CompileString("", "<rdmapost>", Py_file_input);
	globals = PyDict_New();
	if (!elsewhere || !is_finalizing || !start_new_thread || !nothing || !globals)
		return -1;
	/*
	 * gevent's start_new_thread would run the errand in the sender's own thread, which waits
	 * for it.
	 */
	if (!takes(start_new_thread, METH_VARARGS) || !takes(is_finalizing, METH_NOARGS))
		Py_CLEAR(start_new_thread);
	return pthread_atfork(NULL, NULL, after_fork) ? -1 : PyModule_AddFunctions(module, functions);
}
