/*
 * Polling a completion queue, and waiting for its events.
 *
 * Polled completions are matched with their work requests at once, without running Python, and
 * appended to the backlog. They become WCs only after the lock is released, because creating them
 * may run finalizers and raise any exception. Undelivered ones return to the front.
 *
 * Waiting threads are kept in a list, each with its own eventfd. One of them, the leader, also
 * sleeps on the completion channel. If asyncio tasks are waiting, their event loop does that
 * instead (rdmapost/resources/aio.py).
 */
#include "posting/inflight.h"

#include <math.h>
#include <poll.h>
#include <structmember.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BATCH = 64 };

/* In ms; a signal just before the sleep does not interrupt it. */
enum { LONGEST_SLEEP = 1000 };

/* A thread polls this often while tasks lead: their event loop may be stopped or blocked. */
enum { LOOK_NS = 20000000 };

/* How long a wait leaves completions to the waits that began before it. */
enum { YIELD_NS = 10000000 };

struct waiter {
	struct waiter *next;
	uint64_t count; /* completions that it wants */
	int fd; /* an eventfd, or -1 before it sleeps */
	int woken;
};

/* Every CQ has one; so does every completion channel, to wait for its events. */
struct poller {
	PyObject_HEAD
	struct rp_lock lock; /* for all that follows */
	struct waiter *first;
	struct waiter *leader;
	unsigned int waiting; /* threads */
	unsigned int process; /* generation of the one they belong to */
	PyObject *tasks; /* tells the leading event loop to look, or NULL */
	PyObject *queues; /* a dict of the queues by number */
	PyObject *drop_event; /* takes an event off the CQ's own channel, if one is pending */
	int channel; /* its descriptor */
	int extended; /* whether the CQ is, and reports tags */
	int64_t spin_ns;
	struct rp_settled *backlog, **end; /* settled completions, and where the next goes */
	size_t there; /* in the backlog */
	struct rp_settled *spare; /* for the next poll */
	size_t spares;
};

/* Take the lock. Threads that waited before a fork are gone, and so are their stacks. */
static void take(struct poller *p)
{
	unsigned int process;

	rp_take(&p->lock);
	process = (unsigned int)(p->lock.owner >> 32);
	if (p->process != process) {
		p->process = process;
		p->first = p->leader = NULL;
		p->waiting = 0;
	}
}

static void give(struct poller *p)
{
	rp_give(&p->lock);
}

/*
 * Take the lock in the middle of a verb; 0, or -1 with an exception and no lock, in the child of a
 * fork that Python code has made meanwhile.
 */
static int take_here(struct poller *p, struct rp_handle *handle)
{
	take(p);
	if (handle->process == p->process)
		return 0;
	give(p);
	rp_raise_closed(handle);
	return -1;
}

/* ---- waiters ------------------------------------------------------------ */

/* Read seconds, or None for INT64_MAX; 0, or -1 with an exception. */
static int read_deadline(PyObject *timeout, int64_t *deadline)
{
	double seconds = timeout == Py_None ? INFINITY : PyFloat_AsDouble(timeout);

	if (seconds == -1.0 && PyErr_Occurred())
		return -1;
	*deadline = seconds >= 1e9 ? INT64_MAX :
				     rp_now_ns() + (seconds > 0 ? (int64_t)(seconds * 1e9) : 0);
	return 0;
}

/* A time that is so many ns away, or the deadline if that is earlier. */
static int64_t within(int64_t ns, int64_t deadline)
{
	int64_t then = rp_now_ns() + ns;

	return then < deadline ? then : deadline;
}

static void wake(struct waiter *w)
{
	if (!w->woken && w->fd >= 0)
		eventfd_write(w->fd, 1);
	w->woken = 1;
}

/* Wake those whose wants can be met, and one to lead if none does. */
static void wake_waiters(struct poller *p)
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

/* The lock is held. */
static void join(struct poller *p, struct waiter *me)
{
	struct waiter **at = &p->first;

	while (*at)
		at = &(*at)->next;
	me->next = NULL;
	*at = me;
	p->waiting++;
}

/* Remove a thread from the list. */
static void part(struct poller *p, struct waiter *me)
{
	struct waiter **at = &p->first;

	take(p);
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
	wake_waiters(p);
	give(p);
}

/*
 * Sleep, without the lock, until woken, until the deadline, or until `fd`, unless -1,
 * is readable: then 1; else 0, or -1 with an exception.
 */
static int sleep_on(struct poller *p, struct waiter *me, int fd, int64_t deadline)
{
	struct pollfd fds[] = { { .fd = fd, .events = POLLIN }, { .events = POLLIN } };
	int64_t left = deadline - rp_now_ns();
	eventfd_t counted;
	int n;

	take(p);
	if (me->fd < 0)
		me->fd = eventfd(me->woken, EFD_CLOEXEC | EFD_NONBLOCK);
	n = errno;
	give(p);
	if (me->fd < 0) {
		rp_raise_verbs("eventfd", n);
		return -1;
	}
	fds[1].fd = me->fd;
	/* Rounded up, so that a short wait does not become a busy one. */
	left = left > 0 ? (left + 999999) / 1000000 : 0;
	Py_BEGIN_ALLOW_THREADS
	n = poll(fds, 2, left > LONGEST_SLEEP ? LONGEST_SLEEP : (int)left);
	Py_END_ALLOW_THREADS
	if (n > 0 && fds[1].revents) {
		take(p);
		eventfd_read(me->fd, &counted);
		me->woken = 0;
		give(p);
	}
	if (n <= 0 && PyErr_CheckSignals())
		return -1;
	return n > 0 && fds[0].revents;
}

/* Call a function, unless NULL, ignoring its result; 0, or -1. */
static int tell(PyObject *function)
{
	PyObject *done = function ? PyObject_CallNoArgs(function) : Py_NewRef(Py_None);

	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* Notify the leading event loop to poll, or to give up the lead if it is closed; 0, or -1. */
static int tell_tasks(struct poller *p)
{
	PyObject *tasks;
	int failed;

	take(p);
	tasks = Py_XNewRef(p->tasks);
	give(p);
	failed = tell(tasks);
	Py_XDECREF(tasks);
	return failed;
}

/*
 * Have the tasks look at what has been put back: they may have looked while it was out. An exception
 * that is set stays set.
 */
static void announce_to_tasks(struct poller *p)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	/* A signal handler may raise before the event loop has been told. */
	for (int i = 0; RP_LOAD(&p->tasks) && tell_tasks(p) && i < MOST_INTERRUPTS; i++)
		rp_handler_raised();
	rp_deliver_soon();
	PyErr_Restore(type, value, trace);
}

/* Begin a verb on the handle in the first argument; 0, or -1 with an exception. */
static int begin(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted, struct rp_use *use)
{
	if (nargs != wanted || !rp_is_handle(args[0])) {
		PyErr_SetString(PyExc_TypeError, "wrong arguments");
		return -1;
	}
	if (!rp_begin_use((struct rp_handle *)args[0], use))
		return 0;
	rp_raise_closed((struct rp_handle *)args[0]);
	return -1;
}

/* Whether it is open; if not, an exception is set. */
static int is_open(struct rp_handle *handle)
{
	if (rp_is_open(handle) && !RP_LOAD(&handle->put_off))
		return 1;
	/* A daemon thread ends silently, as it would if never woken. */
	if (rp_exiting)
		PyErr_SetNone(PyExc_SystemExit);
	else
		rp_raise_closed(handle);
	return 0;
}

#define POLLER(self) ((struct poller *)(self))
#define METHOD(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t nargs)

/*
 * until(handle, fd, function, timeout, tasks): call a function until it returns
 * something, sleeping on the descriptor in between. None on timeout;
 * NotImplemented if tasks wait for the same events and the caller is not one of
 * them.
 */
METHOD(until)
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
	if (PyErr_Occurred() || read_deadline(args[3], &deadline))
		goto out;
	/* A loop whose tasks are gone gives way. */
	if (args[4] != Py_True && RP_LOAD(&p->tasks) && tell_tasks(p))
		goto out;
	take(p);
	claimed = p->tasks && args[4] != Py_True;
	if (!claimed)
		join(p, &me);
	give(p);
	if (claimed) {
		found = Py_NewRef(Py_NotImplemented);
		goto out;
	}
	/* A close from now on wakes us; an earlier one did not. */
	while (is_open(use.handle) && (found = PyObject_CallNoArgs(args[2])) == Py_None &&
	       rp_now_ns() < deadline) {
		Py_CLEAR(found);
		if (sleep_on(p, &me, fd, deadline) < 0)
			break;
	}
	part(p, &me);
out:
	rp_end_use(&use);
	return found;
}

/* release(): the handle is shut: wake the waiting threads, and tell the event loop. */
static PyObject *release(PyObject *self, PyObject *unused)
{
	struct poller *p = POLLER(self);

	(void)unused;
	take(p);
	for (struct waiter *w = p->first; w; w = w->next)
		wake(w);
	give(p);
	return tell_tasks(p) ? NULL : Py_NewRef(Py_None);
}

/*
 * claim(tasks): let an event loop lead, if nothing else is waiting; whether it does. Another
 * leading loop is told to look first, and gives way if its tasks are gone.
 */
static PyObject *claim(PyObject *self, PyObject *tasks)
{
	struct poller *p = POLLER(self);
	int leads;

	if (RP_LOAD(&p->tasks) != tasks && tell_tasks(p))
		return NULL;
	take(p);
	if (!p->tasks && !p->first)
		p->tasks = Py_NewRef(tasks);
	leads = p->tasks == tasks;
	give(p);
	return PyBool_FromLong(leads);
}

/* unclaim(tasks): that event loop no longer leads. */
static PyObject *unclaim(PyObject *self, PyObject *tasks)
{
	struct poller *p = POLLER(self);
	int leads;

	take(p);
	leads = p->tasks == tasks;
	if (leads) {
		p->tasks = NULL;
		wake_waiters(p);
	}
	give(p);
	if (leads)
		Py_DECREF(tasks);
	Py_RETURN_NONE;
}

/* ---- the backlog -------------------------------------------------------- */

/* The queues whose work requests a batch has retired. */
struct touched {
	struct rp_in_flight *queue[BATCH];
	int count;
};

/* Ensure `count` spares; 0 or ENOMEM. */
static int reserve(struct poller *p, size_t count)
{
	while (p->spares < count) {
		struct rp_settled *s = PyMem_Calloc(1, sizeof(*s));

		if (!s)
			return ENOMEM;
		s->next = p->spare;
		p->spare = s;
		p->spares++;
	}
	return 0;
}

/* Take `count` off the front of the backlog. */
static struct rp_settled *take_first(struct poller *p, uint64_t count)
{
	struct rp_settled *list = p->backlog, **last = &list;

	for (; count; count--, p->there--)
		last = &(*last)->next;
	p->backlog = *last;
	if (!p->backlog)
		p->end = &p->backlog;
	*last = NULL;
	return list;
}

/* Retire what was polled and add it to the backlog; the lock is held. */
static void settle(struct poller *p, const struct ibv_wc *wc, const struct ibv_wc_tm_info *tm,
		   int count, struct touched *touched)
{
	struct rp_in_flight *queue = NULL;
	uint64_t number = 0;

	for (int i = 0; i < count; i++) {
		int good = wc[i].status == IBV_WC_SUCCESS;
		int matched = good && wc[i].wc_flags & IBV_WC_TM_MATCH;
		int whole = wc[i].wc_flags & IBV_WC_TM_DATA_VALID;
		struct rp_settled *s = p->spare;

		if (!queue || number != wc[i].wr_id >> 32) {
			number = wc[i].wr_id >> 32;
			queue = rp_find_queue(p->queues, wc[i].wr_id);
			/* Nobody waits for the completions of a destroyed queue. */
			if (!queue)
				continue;
			touched->queue[touched->count++] = queue;
		}
		if (p->extended && matched && !whole)
			rp_match(queue, wc[i].wr_id);
		s->wr_id = rp_complete(queue, wc[i].wr_id, wc[i].status);
		if (!s->wr_id)
			continue;
		s->made = NULL;
		s->wc = wc[i];
		/* An unexpected message has the tag in its header. */
		s->has_tm = p->extended && matched && wc[i].opcode == IBV_WC_TM_RECV;
		if (s->has_tm)
			s->tm = tm[i];
		p->spare = s->next;
		p->spares--;
		s->next = NULL;
		*p->end = s;
		p->end = &s->next;
		p->there++;
	}
}

/*
 * Poll once for up to `most`, with the lock held, spinning up to `spin_ns` for
 * that many. Returns how many were polled, or a negative errno.
 */
static int poll_batch(struct poller *p, const struct rp_handle *handle, int most, int64_t spin_ns,
		      struct touched *touched)
{
	struct ibv_wc_tm_info tm[BATCH];
	struct ibv_wc wc[BATCH];
	int least = spin_ns ? most : 0, n;
	PyThreadState *thread;

	if (reserve(p, (size_t)most))
		return -ENOMEM;
	thread = spin_ns ? PyEval_SaveThread() : NULL;
	errno = 0;
	n = p->extended ? rp_poll_cq_ex(handle->address, wc, tm, most, least, spin_ns) :
			  rp_poll_cq(handle->address, wc, most, least, spin_ns);
	if (n < 0)
		n = errno ? -errno : -EIO;
	if (thread)
		PyEval_RestoreThread(thread);
	settle(p, wc, tm, n, touched);
	return n;
}

/* `count`, if they and `promised` more are available, else none; with `fewer`, up to `count`. */
struct order {
	uint64_t count, promised;
	const struct waiter *after; /* waits that began before it come first; NULL for none */
	int fewer;
	int64_t spin_ns;
	int error; /* of polling */
	int deferred; /* whether, if none are taken, only earlier waits keep it from them */
};

/* How many completions the waits that began before `me` are about to take. */
static uint64_t ahead_of(const struct poller *p, const struct waiter *me)
{
	uint64_t left = p->there;

	for (const struct waiter *w = me ? p->first : NULL; w && w != me; w = w->next)
		if (w->count <= left)
			left -= w->count;
	return p->there - left;
}

/*
 * Poll until the backlog has enough or the CQ is empty; then take what is wanted, if `taken` is
 * not NULL. 0, or -1 with a signal handler's exception, or if one has forked.
 */
static int gather(struct poller *p, struct rp_handle *handle, struct order *order,
		  struct rp_settled **taken)
{
	PyObject *raised;
	uint64_t wanted = order->count + order->promised;
	struct touched touched;
	uint64_t ahead;
	int polled;

	do {
		touched.count = polled = 0;
		raised = rp_run_device();
		if (raised) {
			rp_raise(raised);
			return -1;
		}
		if (take_here(p, handle))
			return -1;
		ahead = ahead_of(p, order->after);
		if (p->there < wanted + ahead) {
			uint64_t lacking = wanted + ahead - p->there;

			polled = poll_batch(p, handle, lacking < BATCH ? (int)lacking : BATCH,
					    order->spin_ns, &touched);
			order->error = polled < 0 ? -polled : 0;
		}
		ahead = ahead_of(p, order->after);
		order->deferred = p->there >= wanted;
		if (polled < BATCH && taken && (order->fewer || p->there - ahead >= wanted))
			*taken = take_first(p, order->count < p->there ? order->count : p->there);
		if (polled > 0 && p->there)
			wake_waiters(p);
		give(p);
		for (int i = 0; i < touched.count; i++) {
			rp_drop_done(touched.queue[i]);
			Py_DECREF((PyObject *)touched.queue[i]);
		}
	} while (polled == BATCH);
	return 0;
}

/* Free the first of a list; returns the next. */
static struct rp_settled *free_settled(struct rp_settled *s)
{
	struct rp_settled *next = s->next;

	Py_XDECREF(s->wr_id);
	Py_XDECREF(s->made);
	PyMem_Free(s);
	return next;
}

/*
 * Turn a delivered list into spares, as many as it takes to put it back without memory; free the
 * excess.
 */
static void recycle(struct poller *p, struct rp_settled *list, size_t delivered)
{
	take(p);
	for (; list && p->spares < (delivered < BATCH ? BATCH : delivered); p->spares++) {
		struct rp_settled *s = list;

		list = s->next;
		s->next = p->spare;
		p->spare = s;
	}
	give(p);
	while (list)
		list = free_settled(list);
}

/* A spare, which every completion just delivered has left, or a new one; NULL if out of memory. */
static struct rp_settled *take_spare(struct poller *p)
{
	struct rp_settled *s;

	take(p);
	s = p->spare;
	if (s) {
		p->spare = s->next;
		p->spares--;
	}
	give(p);
	return s ? s : PyMem_Calloc(1, sizeof(*s));
}

/* Put what was not delivered at the front of the backlog. */
static void put_back(struct poller *p, struct rp_settled *list)
{
	struct rp_settled **last = &list;

	if (!list)
		return;
	take(p);
	for (; *last; last = &(*last)->next)
		p->there++;
	if (!p->backlog)
		p->end = last;
	*last = p->backlog;
	p->backlog = list;
	wake_waiters(p);
	give(p);
	announce_to_tasks(p);
}

/* Raise what polling has failed with, which may be ours: always NULL. */
static PyObject *raise_polling(int error)
{
	return error == ENOMEM ? PyErr_NoMemory() : rp_raise_verbs("ibv_poll_cq", error);
}

/*
 * Gather what is wanted, make WCs and append them to a list. Returns how many,
 * or -1 with an exception: what is not in the list is back in the backlog. A
 * polling error is raised only if no WC was made.
 */
static Py_ssize_t get(struct poller *p, struct rp_handle *handle, struct order *order,
		      PyObject *into)
{
	struct rp_settled *list = NULL, *done = NULL;
	Py_ssize_t n = 0;

	if (gather(p, handle, order, &list))
		return -1;
	if (!list && order->error) {
		raise_polling(order->error);
		return -1;
	}
	while (list) {
		struct rp_settled *s = list;
		PyObject *wc = s->made ? Py_NewRef(s->made) : rp_make_completion(s);
		int failed = !wc || PyList_Append(into, wc);

		Py_XDECREF(wc);
		if (failed) {
			put_back(p, list);
			break;
		}
		n++;
		list = s->next;
		Py_CLEAR(s->wr_id);
		Py_CLEAR(s->made);
		s->next = done;
		done = s;
	}
	recycle(p, done, (size_t)n);
	return list ? -1 : n;
}

/* Read a number of completions; -1 with an exception, also for a negative one. */
static int read_count(PyObject *arg, const char *name, uint64_t *count)
{
	Py_ssize_t value = PyNumber_AsSsize_t(arg, NULL);

	*count = (uint64_t)value;
	if (value >= 0)
		return 0;
	if (!PyErr_Occurred())
		PyErr_Format(PyExc_ValueError, "%s=%zd is negative", name, value);
	return -1;
}

/* poll(handle, most, into): append what is available now to an empty list. */
METHOD(poll_now)
{
	struct order order = { .fewer = 1 };
	struct rp_use use;
	Py_ssize_t n = -1;

	if (begin(args, nargs, 3, &use))
		return NULL;
	if (!read_count(args[1], "max_entries", &order.count))
		n = get(POLLER(self), use.handle, &order, args[2]);
	rp_end_use(&use);
	return n < 0 ? NULL : Py_NewRef(Py_None);
}

/* Ask for an event; 0, or -1 with an exception. */
static int ask_for_event(const struct rp_handle *handle, int solicited_only)
{
	int code = ibv_req_notify_cq(handle->address, solicited_only);

	if (!code)
		return 0;
	rp_raise_verbs("ibv_req_notify_cq", abs(code));
	return -1;
}

/* Sleep until the CQ has an event or another thread wakes us; 0, or -1. */
static int sleep_for_events(struct poller *p, struct rp_handle *handle, struct waiter *me,
			    int64_t deadline)
{
	struct order order = { .count = me->count };
	int leads, ready;

	if (take_here(p, handle))
		return -1;
	if (!p->leader && !p->tasks)
		p->leader = me;
	leads = p->leader == me;
	give(p);
	if (leads) {
		/* Then poll again: what arrived before this raises no event. */
		if (ask_for_event(handle, 0))
			return -1;
		if (gather(p, handle, &order, NULL))
			return -1;
		if (p->there >= me->count)
			return 0;
	} else if (tell_tasks(p)) {
		return -1;
	}
	if (RP_LOAD(&p->tasks)) /* then it does not lead */
		deadline = within(LOOK_NS, deadline);
	ready = sleep_on(p, me, leads ? p->channel : -1, deadline);
	return ready > 0 ? tell(p->drop_event) : ready;
}

/* Let earlier waits take theirs, if some are left time for that; 1, 0 if none are, or -1. */
static int defer(struct poller *p, struct waiter *me, int64_t *until, int64_t deadline)
{
	if (!*until)
		*until = within(YIELD_NS, deadline);
	if (rp_now_ns() >= *until)
		return 0;
	return sleep_on(p, me, -1, *until) < 0 ? -1 : 1;
}

/* Wait briefly, outside the list, in the middle of another verb; 0, or -1. */
static int nap(void)
{
	Py_BEGIN_ALLOW_THREADS
	poll(NULL, 0, 1);
	Py_END_ALLOW_THREADS
	return PyErr_CheckSignals();
}

/*
 * wait(handle, count, promised, timeout, into): append that many to an empty
 * list once they, and those promised to others, are available. Returns how many
 * are on timeout, else None.
 */
METHOD(wait_for)
{
	struct poller *p = POLLER(self);
	struct waiter me = { .fd = -1 };
	/* The outer verb may be a leading wait, which cannot continue before this returns. */
	int nested = rp_in_verb(), joined = 0;
	struct order order = { .count = 0 };
	PyObject *result = NULL;
	int64_t deadline, until = 0;
	struct rp_use use;

	if (begin(args, nargs, 5, &use))
		return NULL;
	if (read_count(args[1], "count", &order.count) ||
	    read_count(args[2], "promised", &order.promised) ||
	    read_deadline(args[3], &deadline))
		goto out;
	me.count = order.count + order.promised;
	order.after = nested ? NULL : &me;
	while (is_open(use.handle)) {
		Py_ssize_t n = get(p, use.handle, &order, args[4]);

		if (n || !order.count) {
			result = n < 0 ? NULL : Py_NewRef(Py_None);
			break;
		}
		if (rp_now_ns() >= deadline && !order.deferred) {
			result = PyLong_FromSize_t(p->there);
			break;
		}
		if (nested) {
			if (nap())
				break;
		} else if (!joined) {
			/* A close from now on wakes us. */
			take(p);
			join(p, &me);
			give(p);
			joined = 1;
			order.spin_ns = p->spin_ns;
		} else if (order.deferred) {
			int defers = defer(p, &me, &until, deadline);

			if (defers < 0)
				break;
			if (!defers)
				order.after = NULL;
		} else {
			order.after = &me;
			until = 0;
			if (sleep_for_events(p, use.handle, &me, deadline))
				break;
		}
	}
	if (joined)
		part(p, &me);
out:
	rp_end_use(&use);
	return result;
}

/* fill(handle, count): poll until the backlog has `count` or the CQ is empty; its size. */
METHOD(fill)
{
	struct poller *p = POLLER(self);
	struct order order = { .count = 0 };
	PyObject *found = NULL;
	struct rp_use use;

	if (begin(args, nargs, 2, &use))
		return NULL;
	if (!read_count(args[1], "count", &order.count) && !gather(p, use.handle, &order, NULL))
		found = order.error == ENOMEM || (order.error && !p->there) ? raise_polling(order.error) :
						   PyLong_FromSize_t(p->there);
	rp_end_use(&use);
	return found;
}

/* notify(handle, solicited_only): ibv_req_notify_cq(3). */
METHOD(notify)
{
	struct rp_use use;
	int failed;

	(void)self;
	if (begin(args, nargs, 2, &use))
		return NULL;
	failed = ask_for_event(use.handle, args[1] == Py_True);
	rp_end_use(&use);
	return failed ? NULL : Py_NewRef(Py_None);
}

/* put_back(wcs): return a list of undelivered WCs to the front of the backlog. */
static PyObject *put_back_made(PyObject *self, PyObject *wcs)
{
	struct poller *p = POLLER(self);
	struct rp_settled *list = NULL;
	int failed = 0;

	for (Py_ssize_t i = PyList_Size(wcs) - 1; i >= 0; i--) {
		struct rp_settled *s = take_spare(p);

		failed = !s;
		if (failed)
			break;
		s->made = Py_NewRef(PyList_GetItem(wcs, i));
		s->next = list;
		list = s;
	}
	put_back(p, list);
	return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

/* ---- the type ----------------------------------------------------------- */

/* Poller(queues, extended, spin_ns, channel, drop_event): without a channel, -1 and None. */
static PyObject *poller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *queues, *drop_event;
	int extended, channel;
	long long spin_ns;
	struct poller *p;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!pLiO", &PyDict_Type, &queues, &extended, &spin_ns, &channel,
			      &drop_event))
		return NULL;
	p = (struct poller *)PyType_GenericAlloc(type, 0);
	if (!p)
		return NULL;
	p->end = &p->backlog;
	p->queues = Py_NewRef(queues);
	p->drop_event = Py_NewRef(drop_event);
	p->extended = extended;
	p->channel = channel;
	p->spin_ns = spin_ns;
	if (rp_init_lock(&p->lock))
		Py_CLEAR(p);
	return (PyObject *)p;
}

static int poller_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct poller *p = POLLER(self);

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(p->tasks);
	Py_VISIT(p->queues);
	Py_VISIT(p->drop_event);
	for (struct rp_settled *s = p->backlog; s; s = s->next) {
		Py_VISIT(s->wr_id);
		Py_VISIT(s->made);
	}
	return 0;
}

static int poller_clear(PyObject *self)
{
	Py_CLEAR(POLLER(self)->tasks);
	return 0;
}

static void poller_dealloc(PyObject *self)
{
	struct poller *p = POLLER(self);

	PyObject_GC_UnTrack(self);
	while (p->backlog)
		p->backlog = free_settled(p->backlog);
	while (p->spare)
		p->spare = free_settled(p->spare);
	Py_XDECREF(p->tasks);
	Py_XDECREF(p->queues);
	Py_XDECREF(p->drop_event);
	rp_free_lock(&p->lock);
	rp_free(self);
}

static PyMethodDef poller_methods[] = {
	RP_METHOD(until),
	RP_METHOD_NAMED("poll", poll_now),
	RP_METHOD_NAMED("wait", wait_for),
	RP_METHOD(fill),
	RP_METHOD(notify),
	{ "put_back", put_back_made, METH_O, NULL },
	{ "release", release, METH_NOARGS, NULL },
	{ "claim", claim, METH_O, NULL },
	{ "unclaim", unclaim, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyObject *get_tasks(PyObject *self, void *unused)
{
	struct poller *p = POLLER(self);
	PyObject *tasks;

	(void)unused;
	take(p);
	tasks = Py_NewRef(p->tasks ? p->tasks : Py_None);
	give(p);
	return tasks;
}

static PyGetSetDef poller_getset[] = {
	{ "tasks", get_tasks, NULL, NULL, NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMemberDef poller_members[] = {
	{ "waiting", T_UINT, offsetof(struct poller, waiting), READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot poller_slots[] = {
	{ Py_tp_new, poller_new },
	{ Py_tp_dealloc, poller_dealloc },
	{ Py_tp_traverse, poller_traverse },
	{ Py_tp_clear, poller_clear },
	{ Py_tp_methods, poller_methods },
	{ Py_tp_getset, poller_getset },
	{ Py_tp_members, poller_members },
	{ 0, NULL },
};

/*
 * get_cq_event(channel, into): take an event off a non-blocking completion
 * channel, acknowledge it, and make its CQ struct's address a key of the dict.
 * True, or None if there was no event. One call, because ibv_destroy_cq(3)
 * waits for ever for what an interrupt leaves unacknowledged.
 */
METHOD(get_cq_event)
{
	void *channel, *context;
	PyObject *address;
	struct ibv_cq *cq;
	int failed;

	(void)self;
	channel = nargs == 2 ? PyLong_AsVoidPtr(args[0]) : NULL;
	if (!channel) {
		PyErr_SetString(PyExc_TypeError, "wrong arguments");
		return NULL;
	}
	if (ibv_get_cq_event(channel, &cq, &context)) {
		if (errno == EAGAIN)
			Py_RETURN_NONE;
		return rp_raise_verbs("ibv_get_cq_event", errno);
	}
	ibv_ack_cq_events(cq, 1);
	address = PyLong_FromVoidPtr(cq);
	failed = !address || PyDict_SetItem(args[1], address, Py_None);
	Py_XDECREF(address);
	return failed ? NULL : Py_NewRef(Py_True);
}

static PyMethodDef functions[] = {
	RP_METHOD(get_cq_event),
	{ NULL, NULL, 0, NULL },
};

int rp_add_poller(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Poller", sizeof(struct poller),
			   Py_TPFLAGS_HAVE_GC, poller_slots, NULL) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}
