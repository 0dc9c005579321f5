/*
 * Waiting threads are kept in a list, each with its own eventfd. One of them, the leader, also
 * sleeps on the completion channel. If asyncio tasks are waiting, their event loop does that
 * instead (rdmapost/resources/aio.py).
 */
#include "polling/poller.h"

#include <math.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* In ms. Sleeps are limited because a signal just before a sleep does not interrupt it. */
enum { LONGEST_SLEEP = 1000 };

int64_t rp_deadline_of(PyObject *timeout)
{
	double seconds = timeout == Py_None ? INFINITY : PyFloat_AsDouble(timeout);

	return seconds >= 1e9 ? INT64_MAX :
				rp_now_ns() + (seconds > 0 ? (int64_t)(seconds * 1e9) : 0);
}

static void wake(struct waiter *w)
{
	if (!w->woken && w->fd >= 0)
		eventfd_write(w->fd, 1);
	w->woken = 1;
}

void rp_wake_waiters(struct poller *p)
{
	uint64_t left = p->there;

	for (struct waiter *w = p->first; w; w = w->next) {
		if (w->count > left)
			continue;
		left -= w->count;
		wake(w);
	}
	if (p->first && !p->leader && !p->tasks)
		wake(p->first);
}

void rp_join_waiters(struct poller *p, struct waiter *me)
{
	struct waiter **at = &p->first;

	while (*at)
		at = &(*at)->next;
	me->next = NULL;
	*at = me;
	p->waiting++;
}

void rp_leave_waiters(struct poller *p, struct waiter *me)
{
	struct waiter **at = &p->first;
	int locked = lock_if_free(p);

	while (*at && *at != me)
		at = &(*at)->next;
	if (*at) {
		*at = me->next;
		p->waiting--;
	}
	if (p->leader == me)
		p->leader = NULL;
	if (me->fd >= 0)
		close(me->fd);
	rp_wake_waiters(p);
	unlock_if(p, locked);
}

int rp_sleep_on_event(struct poller *p, struct waiter *me, int fd, int64_t deadline)
{
	struct pollfd fds[] = { { .fd = fd, .events = POLLIN }, { .events = POLLIN } };
	int64_t left = deadline - rp_now_ns();
	eventfd_t counted;
	int n, error, skip = RP_LOAD(&rp_deaf) ? 1 : 0;

	if (rp_thread()->lacks_stack) {
		PyErr_SetString(PyExc_RecursionError,
				"maximum recursion depth exceeded in the device's work, for which this "
				"thread would wait");
		return -1;
	}
	if (lock_poller(p))
		return -1;
	if (me->fd < 0)
		me->fd = eventfd(me->woken, EFD_CLOEXEC | EFD_NONBLOCK);
	error = errno;
	unlock_poller(p);
	if (me->fd < 0) {
		rp_raise_verbs("eventfd", error);
		return -1;
	}
	fds[1].fd = me->fd;
	/* Round up, so that a short wait does not become a busy loop. */
	left = left > 0 ? (left + 999999) / 1000000 : 0;
	/* A device that lacks memory to receive leaves its descriptor readable: look again soon. */
	if (skip && left > 1)
		left = 1;
	RP_ADD(&rp_sleeping, 1);
	Py_BEGIN_ALLOW_THREADS
	n = poll(fds + skip, 2 - skip, left > LONGEST_SLEEP ? LONGEST_SLEEP : (int)left);
	Py_END_ALLOW_THREADS
	RP_ADD(&rp_sleeping, -1);
	if (n > 0 && fds[1].revents) {
		if (lock_poller(p))
			return -1;
		eventfd_read(me->fd, &counted);
		me->woken = 0;
		unlock_poller(p);
	}
	if (n <= 0 && PyErr_CheckSignals())
		return -1;
	return n > 0 && fds[0].revents;
}

int rp_notify_tasks(struct poller *p)
{
	PyObject *tasks;
	int failed;

	if (lock_poller(p))
		return -1;
	tasks = Py_XNewRef(p->tasks);
	unlock_poller(p);
	failed = call_optional(tasks);
	Py_XDECREF(tasks);
	return failed;
}

void rp_notify_tasks_surely(struct poller *p)
{
	struct rp_error error = rp_save_error();

	/* A signal handler may raise before the event loop has been notified. */
	for (int i = 0; RP_LOAD(&p->tasks) && rp_notify_tasks(p) && i < MAX_INTERRUPTS; i++)
		rp_handler_raised();
	rp_deliver_soon();
	rp_restore_error(error);
}

int rp_may_wait(struct rp_handle *handle)
{
	if (rp_is_open(handle) && !RP_LOAD(&handle->deferred_by))
		return 1;
	/* End a daemon thread as silently as if it had never been woken. */
	if (rp_exiting)
		PyErr_SetNone(PyExc_SystemExit);
	else
		rp_raise_closed(handle);
	return 0;
}

/*
 * until(handle, fd, function, timeout, is_task): call a function until its result is not None, and
 * sleep on the descriptor between calls. Returns that result; None on timeout; NotImplemented if
 * tasks wait for the same events and the caller is not one of them.
 */
RP_POLLER_METHOD(rp_until)
{
	struct poller *p = POLLER(self);
	struct waiter me = { .count = UINT64_MAX, .fd = -1 };
	PyObject *found = NULL;
	struct rp_use use;
	int64_t deadline;
	int claimed, fd;

	if (begin(args, nargs, 5, &use))
		return NULL;
	fd = (int)PyLong_AsLong(args[1]);
	deadline = rp_deadline_of(args[3]);
	if (PyErr_Occurred())
		goto out;
	/* An event loop whose tasks are gone gives up the lead. */
	if (args[4] != Py_True && RP_LOAD(&p->tasks) && rp_notify_tasks(p))
		goto out;
	if (lock_poller(p))
		goto out;
	claimed = p->tasks && args[4] != Py_True;
	if (!claimed)
		rp_join_waiters(p, &me);
	unlock_poller(p);
	if (claimed) {
		found = Py_NewRef(Py_NotImplemented);
		goto out;
	}
	rp_thread()->lacks_stack = 0;
	/* A close before rp_join_waiters() did not wake this thread, so check for one before each sleep. */
	while (rp_may_wait(use.handle) && (found = PyObject_CallNoArgs(args[2])) == Py_None &&
	       rp_now_ns() < deadline) {
		Py_CLEAR(found);
		if (rp_sleep_on_event(p, &me, fd, deadline) < 0)
			break;
	}
	rp_leave_waiters(p, &me);
out:
	rp_end_use(&use);
	return found;
}

/* wake_all(): the handle is closing; wake the waiting threads, and notify the event loop. */
PyObject *rp_wake_all(PyObject *self, PyObject *unused)
{
	struct poller *p = POLLER(self);

	(void)unused;
	if (lock_poller(p))
		return NULL;
	for (struct waiter *w = p->first; w; w = w->next)
		wake(w);
	unlock_poller(p);
	return rp_notify_tasks(p) ? NULL : Py_NewRef(Py_None);
}

/* cancel(for_good): end the waits in progress and, if `for_good`, all later ones. */
PyObject *rp_cancel_waits(PyObject *self, PyObject *for_good)
{
	struct poller *p = POLLER(self);

	if (for_good == Py_True)
		RP_STORE(&p->refuses, 1);
	RP_ADD(&p->cancels, 1);
	return rp_wake_all(self, NULL);
}

/*
 * claim(tasks): let an event loop lead if nothing else is waiting; return whether it leads. If
 * another loop leads, that one is notified first, and gives up the lead if its tasks are gone.
 */
PyObject *rp_claim(PyObject *self, PyObject *tasks)
{
	struct poller *p = POLLER(self);
	int leads;

	if (RP_LOAD(&p->tasks) != tasks && rp_notify_tasks(p))
		return NULL;
	if (lock_poller(p))
		return NULL;
	if (!p->tasks && !p->first)
		p->tasks = Py_NewRef(tasks);
	leads = p->tasks == tasks;
	p->claims += (unsigned int)leads;
	unlock_poller(p);
	return PyBool_FromLong(leads);
}

/*
 * unclaim(tasks, claims): end an event loop's lead if the number of claims is still `claims`;
 * return False if the loop still leads, else True.
 */
RP_POLLER_METHOD(rp_unclaim)
{
	struct poller *p = POLLER(self);
	PyObject *tasks = nargs == 2 ? args[0] : NULL;
	unsigned long claims = nargs == 2 ? PyLong_AsUnsignedLong(args[1]) : 0;
	int led, ends;

	if (!tasks || PyErr_Occurred()) {
		PyErr_SetString(PyExc_TypeError, "wrong arguments");
		return NULL;
	}
	if (lock_poller(p))
		return NULL;
	led = p->tasks == tasks;
	ends = led && p->claims == claims;
	if (ends) {
		p->tasks = NULL;
		rp_wake_waiters(p);
	}
	unlock_poller(p);
	if (ends)
		Py_DECREF(tasks);
	return PyBool_FromLong(ends || !led);
}
