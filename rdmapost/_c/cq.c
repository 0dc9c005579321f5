/*
 * Polling a completion queue, and waiting for what it announces.
 *
 * What is polled is settled at once, which runs no Python, and becomes WCs
 * only when the lock has been given back: making them may run finalizers, and
 * anything may be raised.  What is not delivered then goes back to the front
 * of the backlog.
 *
 * Threads that wait stand in a list, each with an eventfd of its own to be
 * woken by.  One of them, the leader, also sleeps on the completion channel.
 * Where asyncio tasks wait, their event loop does that (rdmapost/aio.py).
 */
#include "inflight.h"

#include <math.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64 };

/* In ms; a signal that comes just before the sleep does not end it. */
enum { LONGEST_SLEEP = 1000 };

/* ---- who waits ---------------------------------------------------------- */

struct waiter {
	struct waiter *next;
	unsigned long thread;
	uint64_t count; /* completions that it wants */
	int fd; /* an eventfd, or -1 before it sleeps */
	int woken;
};

/* Threads that wait for the events of a channel; the base of the poller, too. */
struct waiters {
	PyObject_HEAD
	struct rp_lock *lock; /* for all that follows, and a poller's rest */
	struct waiter *first;
	struct waiter *leader;
	PyObject *tasks; /* tells the event loop that leads to look, or NULL */
};

/* How the lock is held: not, by who is further up in this thread, by us. */
enum held { BUSY, OWN, TAKEN };

/* Who is in the middle of another verb has locks that others may wait for. */
static enum held enter(struct waiters *ws, int nested)
{
	if (rp_owns(ws->lock))
		return OWN;
	if (nested)
		return rp_try(ws->lock) ? TAKEN : BUSY;
	rp_take(ws->lock);
	return TAKEN;
}

static void leave(struct waiters *ws, enum held held)
{
	if (held == TAKEN)
		rp_give(ws->lock);
}

static int64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/* Read seconds, or None for INT64_MAX; 0, or -1 with an exception. */
static int read_deadline(PyObject *timeout, int64_t *deadline)
{
	double seconds = timeout == Py_None ? INFINITY :
					      PyFloat_AsDouble(timeout);

	if (seconds == -1.0 && PyErr_Occurred())
		return -1;
	*deadline = seconds >= 1e9 ? INT64_MAX :
		    now_ns() + (seconds > 0 ? (int64_t)(seconds * 1e9) : 0);
	return 0;
}

static void wake(struct waiter *w)
{
	if (!w->woken && w->fd >= 0)
		eventfd_write(w->fd, 1);
	w->woken = 1;
}

/* Wake those for whom there are enough, and one to lead if nobody does. */
static void wake_waiters(struct waiters *ws, uint64_t there)
{
	for (struct waiter *w = ws->first; w; w = w->next) {
		if (w->count > there)
			continue;
		there -= w->count;
		wake(w);
	}
	if (ws->first && !ws->leader && !ws->tasks)
		wake(ws->first);
}

static void join(struct waiters *ws, struct waiter *me)
{
	struct waiter **at = &ws->first;

	while (*at)
		at = &(*at)->next;
	me->next = NULL;
	*at = me;
}

/* Let a thread wait no longer; `there` is for the others. */
static void part(struct waiters *ws, struct waiter *me, uint64_t there)
{
	struct waiter **at = &ws->first;

	while (*at && *at != me)
		at = &(*at)->next;
	if (*at)
		*at = me->next;
	if (ws->leader == me)
		ws->leader = NULL;
	if (me->fd >= 0)
		close(me->fd);
	wake_waiters(ws, there);
}

/*
 * Sleep, without the lock, until woken, or until `fd` is readable if it is not
 * -1: then 1; else 0, or -1 with an exception.
 */
static int sleep_on(struct waiters *ws, struct waiter *me, int fd,
		    int64_t deadline)
{
	struct pollfd fds[] = { { .fd = fd, .events = POLLIN },
				{ .events = POLLIN } };
	int64_t left = deadline - now_ns();
	eventfd_t counted;
	int n, error = 0;

	enter(ws, 0);
	if (me->fd < 0) {
		me->fd = eventfd(me->woken, EFD_CLOEXEC | EFD_NONBLOCK);
		error = me->fd < 0 ? errno : 0;
	}
	rp_give(ws->lock);
	if (error) {
		rp_raise_verbs("eventfd", error);
		return -1;
	}
	fds[1].fd = me->fd;
	/* Rounded up, so that a short wait does not become a busy one. */
	left = left > 0 ? (left + 999999) / 1000000 : 0;
	Py_BEGIN_ALLOW_THREADS
	n = poll(fds, 2, left > LONGEST_SLEEP ? LONGEST_SLEEP : (int)left);
	Py_END_ALLOW_THREADS
	if (n > 0 && fds[1].revents) {
		enter(ws, 0);
		eventfd_read(me->fd, &counted);
		me->woken = 0;
		rp_give(ws->lock);
	}
	if (n <= 0 && PyErr_CheckSignals())
		return -1;
	return n > 0 && fds[0].revents;
}

/* Tell the event loop that leads to look, or to go if it is closed; 0, or -1. */
static int tell_tasks(struct waiters *ws)
{
	PyObject *tasks, *done;

	enter(ws, 0);
	tasks = Py_XNewRef(ws->tasks);
	rp_give(ws->lock);
	if (!tasks)
		return 0;
	done = PyObject_CallNoArgs(tasks);
	Py_DECREF(tasks);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* Begin a verb with the handle that is the first argument; 0, or -1 with an exception. */
static int begin(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted,
		 struct rp_use *use)
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

static int exiting;

/* Whether it is open; if not, with an exception. */
static int is_open(struct rp_handle *handle)
{
	if (rp_is_open(handle))
		return 1;
	/* A daemon thread ends without a word, as it would if nobody had woken it. */
	if (exiting)
		PyErr_SetNone(PyExc_SystemExit);
	else
		rp_raise_closed(handle);
	return 0;
}

/*
 * until(handle, fd, function, timeout, tasks): call a function until it returns
 * something, and sleep on the descriptor in between.  None if nothing came;
 * NotImplemented if tasks wait for the same events, and it is not they who ask.
 */
static PyObject *until(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	struct waiters *ws = (struct waiters *)self;
	struct waiter me = { .count = UINT64_MAX, .fd = -1,
			     .thread = (unsigned long)pthread_self() };
	PyObject *found = NULL;
	struct rp_use use;
	int64_t deadline;
	int claimed, fd;

	if (begin(args, nargs, 5, &use))
		return NULL;
	fd = (int)PyLong_AsLong(args[1]);
	if (PyErr_Occurred() || read_deadline(args[3], &deadline))
		goto out;
	enter(ws, 0);
	claimed = ws->tasks && args[4] != Py_True;
	if (!claimed)
		join(ws, &me);
	rp_give(ws->lock);
	if (claimed) {
		found = Py_NewRef(Py_NotImplemented);
		goto out;
	}
	/* Whoever shuts it now wakes us, and whoever has did not. */
	while (is_open(use.handle) &&
	       (found = PyObject_CallNoArgs(args[2])) == Py_None &&
	       now_ns() < deadline) {
		Py_CLEAR(found);
		if (sleep_on(ws, &me, fd, deadline) < 0)
			break;
	}
	enter(ws, 0);
	part(ws, &me, 0);
	rp_give(ws->lock);
out:
	rp_end_use(&use);
	return found;
}

/*
 * release(): wake the threads that wait, of a handle that is shut, and tell the
 * event loop; return when no other thread waits any more.
 */
static PyObject *release(PyObject *self, PyObject *unused)
{
	struct waiters *ws = (struct waiters *)self;
	struct waiter me = { .count = 0, .fd = -1,
			     .thread = (unsigned long)pthread_self() };
	int others, failed;

	(void)unused;
	if (rp_owns(ws->lock))
		Py_RETURN_NONE;
	failed = tell_tasks(ws);
	enter(ws, 0);
	join(ws, &me);
	do {
		others = 0;
		for (struct waiter *w = ws->first; w; w = w->next) {
			/* Nor one further up in this thread, or one like us. */
			if (w->thread == me.thread || !w->count)
				continue;
			others = 1;
			wake(w);
		}
		rp_give(ws->lock);
		if (others && !failed)
			failed = sleep_on(ws, &me, -1, INT64_MAX) < 0;
		enter(ws, 0);
	} while (others && !failed);
	part(ws, &me, 0);
	rp_give(ws->lock);
	if (failed)
		return NULL;
	Py_RETURN_NONE;
}

/* claim(tasks): let an event loop lead; whether it may: nobody else waits. */
static PyObject *claim(PyObject *self, PyObject *tasks)
{
	struct waiters *ws = (struct waiters *)self;
	int free;

	enter(ws, 0);
	free = !ws->tasks && !ws->first;
	if (free)
		ws->tasks = Py_NewRef(tasks);
	rp_give(ws->lock);
	return PyBool_FromLong(free);
}

/* unclaim(tasks): that event loop leads no more. */
static PyObject *unclaim(PyObject *self, PyObject *tasks)
{
	struct waiters *ws = (struct waiters *)self;
	int leads;

	enter(ws, 0);
	leads = ws->tasks == tasks;
	if (leads) {
		ws->tasks = NULL;
		wake_waiters(ws, 0);
	}
	rp_give(ws->lock);
	if (leads)
		Py_DECREF(tasks);
	Py_RETURN_NONE;
}

/* How many threads wait. */
static PyObject *waiting(PyObject *self, void *unused)
{
	struct waiters *ws = (struct waiters *)self;
	long count = 0;

	(void)unused;
	enter(ws, 0);
	for (struct waiter *w = ws->first; w; w = w->next)
		count++;
	rp_give(ws->lock);
	return PyLong_FromLong(count);
}

static PyGetSetDef waiters_getset[] = {
	{ "waiting", waiting, NULL, NULL, NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

/* ---- a CQ, and what has been polled and not been taken ------------------ */

struct poller {
	struct waiters waiters;
	PyObject *queues; /* a dict of the queues by number */
	PyObject *drop_event; /* takes an event off the CQ's own channel, if one is there */
	int channel; /* the descriptor of that */
	int extended; /* the CQ is: it tells tags */
	int64_t spin_ns;
	/* A ring of what is settled. */
	struct rp_settled *backlog;
	size_t size; /* a power of two, or 0 */
	size_t first, end;
	size_t out; /* settled and being delivered: they may come back */
};

/* The queues that a batch has retired work requests of. */
struct touched {
	struct rp_in_flight *queue[BATCH];
	int count;
};

static size_t there(const struct poller *p)
{
	return p->end - p->first;
}

static struct rp_settled *at(struct poller *p, size_t index)
{
	return &p->backlog[index & (p->size - 1)];
}

/* Have room for so many more, whatever comes back; 0 or ENOMEM. */
static int reserve(struct poller *p, size_t more)
{
	size_t out = __atomic_load_n(&p->out, __ATOMIC_RELAXED);
	size_t needed = there(p) + out + more, size = p->size;
	struct rp_settled *backlog;

	while (size < needed)
		size = size ? 2 * size : BATCH;
	if (size == p->size)
		return 0;
	backlog = PyMem_Malloc(size * sizeof(*backlog));
	if (!backlog)
		return ENOMEM;
	for (size_t i = p->first; i != p->end; i++)
		backlog[i & (size - 1)] = *at(p, i);
	PyMem_Free(p->backlog);
	p->backlog = backlog;
	p->size = size;
	return 0;
}

/* Retire what has been polled, with the lock held; return how many are left of it. */
static size_t settle(struct poller *p, const struct ibv_wc *wc,
		     const struct ibv_wc_tm_info *tm, int count,
		     struct rp_settled *into, struct touched *touched)
{
	struct rp_in_flight *queue = NULL;
	uint64_t number = 0;
	size_t n = 0;

	for (int i = 0; i < count; i++) {
		int good = wc[i].status == IBV_WC_SUCCESS;
		int matched = good && wc[i].wc_flags & IBV_WC_TM_MATCH;
		int whole = wc[i].wc_flags & IBV_WC_TM_DATA_VALID;
		struct rp_settled *s = into + n;

		if (!queue || number != wc[i].wr_id >> 32) {
			number = wc[i].wr_id >> 32;
			queue = rp_find_queue(p->queues, wc[i].wr_id);
			/* Of a queue that has been destroyed nobody waits for it. */
			if (!queue)
				continue;
			touched->queue[touched->count++] = queue;
		}
		if (p->extended && matched && !whole)
			rp_match(queue, wc[i].wr_id);
		s->wr_id = rp_complete(queue, wc[i].wr_id);
		if (!s->wr_id)
			continue;
		s->made = NULL;
		s->wc = wc[i];
		/* The second completion of a message does not say what the first has said. */
		s->has_tm = p->extended && good &&
			    wc[i].opcode == IBV_WC_TM_RECV &&
			    (matched || !whole);
		if (s->has_tm)
			s->tm = tm[i];
		n++;
	}
	return n;
}

static void drop_touched(struct touched *touched)
{
	for (int i = 0; i < touched->count; i++) {
		rp_drop_done(touched->queue[i]);
		Py_DECREF((PyObject *)touched->queue[i]);
	}
}

/*
 * Poll once, with the lock held, and settle it; spin so long until there are
 * `most`, BATCH or fewer.  Returns how many were polled, or a negative errno.
 */
static int poll_batch(struct poller *p, const struct rp_handle *handle,
		      int most, int64_t spin_ns, struct rp_settled *into,
		      size_t *settled, struct touched *touched)
{
	struct ibv_wc_tm_info tm[BATCH];
	struct ibv_wc wc[BATCH];
	int least = spin_ns ? most : 0, n;
	PyThreadState *thread;

	*settled = 0;
	if (reserve(p, (size_t)most))
		return -ENOMEM;
	thread = spin_ns ? PyEval_SaveThread() : NULL;
	errno = 0;
	n = p->extended ? rp_poll_cq_ex(handle->address, wc, tm, most, least,
					spin_ns) :
			  rp_poll_cq(handle->address, wc, most, least, spin_ns);
	if (n < 0)
		n = errno ? -errno : -EIO;
	if (thread)
		PyEval_RestoreThread(thread);
	if (n > 0)
		*settled = settle(p, wc, tm, n, into, touched);
	return n;
}

/* Poll until there are `count` in the backlog, or no more; 0 or an errno. */
static int fill(struct poller *p, const struct rp_handle *handle,
		uint64_t count, int64_t spin_ns, int nested)
{
	struct rp_settled settled[BATCH];
	int room, n;

	do {
		struct touched touched = { .count = 0 };
		enum held held = enter(&p->waiters, nested);
		size_t added;

		if (held != TAKEN || there(p) >= count) {
			leave(&p->waiters, held);
			return 0;
		}
		room = count - there(p) < BATCH ? (int)(count - there(p)) :
						  BATCH;
		n = poll_batch(p, handle, room, spin_ns, settled, &added,
			       &touched);
		for (size_t i = 0; i < added; i++)
			*at(p, p->end++) = settled[i];
		if (added)
			wake_waiters(&p->waiters, there(p));
		leave(&p->waiters, held);
		drop_touched(&touched);
	} while (n == room);
	return n < 0 ? -n : 0;
}

/*
 * Take `count` out of the backlog if there are that many and `promised` more,
 * else none, or, with `fewer`, what there is.  Into an array of BATCH, or where
 * it does not hold them, one to be freed.  Returns how many, or -1.
 */
static Py_ssize_t take(struct poller *p, uint64_t count, uint64_t promised,
		       int fewer, int nested, struct rp_settled **into)
{
	enum held held = enter(&p->waiters, nested);
	Py_ssize_t n = 0;

	if (held != BUSY && (fewer || there(p) >= promised + count))
		n = (Py_ssize_t)(count < there(p) ? count : there(p));
	if (n > BATCH)
		*into = PyMem_Malloc((size_t)n * sizeof(**into));
	if (*into) {
		for (Py_ssize_t i = 0; i < n; i++)
			(*into)[i] = *at(p, p->first++);
		__atomic_add_fetch(&p->out, (size_t)n, __ATOMIC_RELAXED);
	}
	leave(&p->waiters, held);
	return *into ? n : -1;
}

static void back_to_front(struct poller *p, const struct rp_settled *settled)
{
	*at(p, --p->first) = *settled;
}

/*
 * Make WCs, and append them to a list; 0, or -1 with an exception: what is not
 * in the list is in the backlog again.
 */
static int deliver(struct poller *p, struct rp_settled *settled,
		   Py_ssize_t count, PyObject *into)
{
	Py_ssize_t done = 0;
	int failed = 0;
	enum held held;

	for (; done < count; done++) {
		struct rp_settled *s = settled + done;
		PyObject *wc = s->made ? Py_NewRef(s->made) :
					 rp_make_completion(s);

		failed = !wc || PyList_Append(into, wc);
		Py_XDECREF(wc);
		if (failed)
			break;
		Py_XDECREF(s->wr_id);
		Py_XDECREF(s->made);
	}
	__atomic_sub_fetch(&p->out, (size_t)done, __ATOMIC_RELAXED);
	if (!failed)
		return 0;
	held = enter(&p->waiters, 0);
	for (Py_ssize_t i = count - 1; i >= done; i--)
		back_to_front(p, settled + i);
	__atomic_sub_fetch(&p->out, (size_t)(count - done), __ATOMIC_RELAXED);
	wake_waiters(&p->waiters, there(p));
	leave(&p->waiters, held);
	return -1;
}

/*
 * What follows from taking `count`, or -1: deliver them, or raise what went
 * wrong; 0, or -1 with an exception.
 */
static int finish(struct poller *p, struct rp_settled *settled,
		  struct rp_settled *here, Py_ssize_t count, int code,
		  PyObject *into)
{
	int failed = -1;

	if (count < 0 || (!count && code == ENOMEM))
		PyErr_NoMemory();
	else if (!count && code)
		rp_raise_verbs("ibv_poll_cq", code);
	else
		failed = deliver(p, settled, count, into);
	if (settled != here)
		PyMem_Free(settled);
	return failed;
}

/* A number of completions; -1 with an exception, also for a negative one. */
static Py_ssize_t read_count(PyObject *arg, const char *name)
{
	Py_ssize_t count = PyNumber_AsSsize_t(arg, NULL);

	if (count >= 0)
		return count;
	if (!PyErr_Occurred())
		PyErr_Format(PyExc_ValueError, "%s=%zd is negative", name,
			     count);
	return -1;
}

#define METHOD(name)                                                           \
	static PyObject *poller_##name(PyObject *self, PyObject *const *args,  \
				       Py_ssize_t nargs)
#define POLLER(self) ((struct poller *)(self))

/* poll(handle, most, into): append what is there now to an empty list. */
METHOD(poll)
{
	struct rp_settled here[BATCH], *settled = here;
	struct touched touched = { .count = 0 };
	struct poller *p = POLLER(self);
	int nested = rp_in_verb(), code = 0, failed = -1, direct;
	Py_ssize_t most, n = 0;
	struct rp_use use;
	enum held held;

	if (begin(args, nargs, 3, &use))
		return NULL;
	most = read_count(args[1], "max_entries");
	if (most < 0)
		goto out;
	/* The usual case does not go by way of the backlog. */
	held = enter(&p->waiters, nested);
	direct = held == TAKEN && !there(p) && most <= BATCH;
	if (direct && most) {
		size_t added;
		int polled = poll_batch(p, use.handle, (int)most, 0, here,
					&added, &touched);

		code = polled < 0 ? -polled : 0;
		n = (Py_ssize_t)added;
		__atomic_add_fetch(&p->out, added, __ATOMIC_RELAXED);
	}
	leave(&p->waiters, held);
	drop_touched(&touched);
	if (!direct) {
		code = fill(p, use.handle, (uint64_t)most, 0, nested);
		n = take(p, (uint64_t)most, 0, 1, nested, &settled);
	}
	failed = finish(p, settled, here, n, code, args[2]);
out:
	rp_end_use(&use);
	return failed ? NULL : Py_NewRef(Py_None);
}

/* Go to sleep until the CQ announces something, or somebody wakes us; 0, or -1. */
static int sleep_for_events(struct poller *p, const struct rp_handle *handle,
			    struct waiter *me, int64_t deadline)
{
	struct waiters *ws = &p->waiters;
	int leads, ready, code;
	PyObject *done;

	enter(ws, 0);
	if (!ws->leader && !ws->tasks)
		ws->leader = me;
	leads = ws->leader == me;
	rp_give(ws->lock);
	if (leads) {
		/* Ask for an event, then look again: what came in between raises none. */
		code = ibv_req_notify_cq(handle->address, 0);
		if (code) {
			rp_raise_verbs("ibv_req_notify_cq", abs(code));
			return -1;
		}
		fill(p, handle, me->count, 0, 0);
		if (there(p) >= me->count)
			return 0;
	} else if (tell_tasks(ws)) {
		return -1;
	}
	ready = sleep_on(ws, me, leads ? p->channel : -1, deadline);
	if (ready <= 0)
		return ready;
	done = PyObject_CallNoArgs(p->drop_event);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* Wait, without a place in the list, in the middle of another verb; 0, or -1. */
static int nap(const struct waiters *ws)
{
	if (rp_owns(ws->lock)) {
		PyErr_SetString(PyExc_RuntimeError,
				"this thread is in the middle of polling the "
				"same CQ: a signal handler, say, cannot wait "
				"for it");
		return -1;
	}
	Py_BEGIN_ALLOW_THREADS
	poll(NULL, 0, 1);
	Py_END_ALLOW_THREADS
	return PyErr_CheckSignals();
}

/*
 * wait(handle, count, promised, timeout, into): append that many to an empty
 * list when they, and those promised to others, are there.  Returns how many
 * there are where they do not come in time, else None.
 */
METHOD(wait)
{
	struct rp_settled here[BATCH], *settled = here;
	struct poller *p = POLLER(self);
	struct waiters *ws = &p->waiters;
	struct waiter me = { .fd = -1,
			     .thread = (unsigned long)pthread_self() };
	int nested = rp_in_verb(), joined = 0, failed = -1, code;
	PyObject *lacking = NULL;
	int64_t deadline;
	Py_ssize_t count, promised, n;
	struct rp_use use;

	if (begin(args, nargs, 5, &use))
		return NULL;
	count = read_count(args[1], "count");
	promised = count < 0 ? -1 : read_count(args[2], "promised");
	if (promised < 0 || read_deadline(args[3], &deadline))
		goto out;
	me.count = (uint64_t)count + (uint64_t)promised;
	while (is_open(use.handle)) {
		code = fill(p, use.handle, me.count, joined ? p->spin_ns : 0,
			    nested);
		n = take(p, (uint64_t)count, (uint64_t)promised, 0, nested,
			 &settled);
		if (n || code || !count) {
			failed = finish(p, settled, here, n, code, args[4]);
			break;
		}
		if (now_ns() >= deadline) {
			lacking = PyLong_FromSize_t(there(p));
			failed = !lacking;
			break;
		}
		if (nested) {
			if (nap(ws))
				break;
		} else if (!joined) {
			/* Whoever shuts it from now on wakes us. */
			enter(ws, 0);
			join(ws, &me);
			rp_give(ws->lock);
			joined = 1;
		} else if (sleep_for_events(p, use.handle, &me, deadline)) {
			break;
		}
	}
	if (joined) {
		enter(ws, 0);
		part(ws, &me, there(p));
		rp_give(ws->lock);
	}
out:
	rp_end_use(&use);
	if (failed)
		return NULL;
	return lacking ? lacking : Py_NewRef(Py_None);
}

/*
 * look(handle, count): ask for the next event, and poll until there are so many
 * or no more; returns how many there are.
 */
METHOD(look)
{
	struct poller *p = POLLER(self);
	int nested = rp_in_verb(), code = 0;
	PyObject *found = NULL;
	struct rp_use use;
	Py_ssize_t count;

	if (begin(args, nargs, 2, &use))
		return NULL;
	count = read_count(args[1], "count");
	if (count >= 0) {
		code = abs(ibv_req_notify_cq(use.handle->address, 0));
		if (code) {
			rp_raise_verbs("ibv_req_notify_cq", code);
		} else {
			code = fill(p, use.handle, (uint64_t)count, 0, nested);
			found = code && !there(p) ?
					rp_raise_verbs("ibv_poll_cq", code) :
					PyLong_FromSize_t(there(p));
		}
	}
	rp_end_use(&use);
	return found;
}

/* notify(handle, solicited_only): ibv_req_notify_cq(3); 0 or an errno. */
METHOD(notify)
{
	struct rp_use use;
	int code;

	(void)self;
	if (begin(args, nargs, 2, &use))
		return NULL;
	code = ibv_req_notify_cq(use.handle->address,
				 args[1] == Py_True);
	rp_end_use(&use);
	return PyLong_FromLong(abs(code));
}

/*
 * keep(handle, cqe): take what is in the queue now, not more than it holds, into
 * the backlog; do nothing where this thread is polling it, or it is closed.
 */
METHOD(keep)
{
	struct poller *p = POLLER(self);
	int nested = rp_in_verb();
	struct rp_use use;
	Py_ssize_t cqe;

	if (begin(args, nargs, 2, &use)) {
		PyErr_Clear();
		Py_RETURN_NONE;
	}
	cqe = PyLong_AsSsize_t(args[1]);
	if (cqe > 0)
		fill(p, use.handle, there(p) + (uint64_t)cqe, 0, nested);
	rp_end_use(&use);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* put_back(wcs): let a list of WCs that nobody got be the next to be taken. */
static PyObject *poller_put_back(PyObject *self, PyObject *wcs)
{
	struct poller *p = POLLER(self);
	Py_ssize_t count = PyList_Size(wcs);
	enum held held;

	if (count < 0)
		return NULL;
	/* In the middle of another verb the lock may be another thread's, which waits for us. */
	if (!count)
		Py_RETURN_NONE;
	held = enter(&p->waiters, 0);
	if (reserve(p, (size_t)count)) {
		leave(&p->waiters, held);
		return PyErr_NoMemory();
	}
	while (count--) {
		struct rp_settled settled = {
			.made = Py_NewRef(PyList_GetItem(wcs, count))
		};

		back_to_front(p, &settled);
	}
	wake_waiters(&p->waiters, there(p));
	leave(&p->waiters, held);
	Py_RETURN_NONE;
}

/* ---- the types ---------------------------------------------------------- */

static PyObject *waiters_new(PyTypeObject *type, PyObject *args,
			     PyObject *kwargs)
{
	struct waiters *ws = (struct waiters *)PyType_GenericAlloc(type, 0);

	(void)args;
	(void)kwargs;
	if (!ws)
		return NULL;
	ws->lock = (struct rp_lock *)PyObject_CallNoArgs(rp_lock_type);
	if (!ws->lock)
		Py_CLEAR(ws);
	return (PyObject *)ws;
}

/* Poller(queues, extended, spin_ns, channel, drop_event): without a channel, -1 and None. */
static PyObject *poller_new(PyTypeObject *type, PyObject *args,
			    PyObject *kwargs)
{
	PyObject *self, *queues, *drop_event;
	int extended, channel;
	long long spin_ns;

	if (!PyArg_ParseTuple(args, "O!pLiO", &PyDict_Type, &queues, &extended,
			      &spin_ns, &channel, &drop_event))
		return NULL;
	self = waiters_new(type, args, kwargs);
	if (!self)
		return NULL;
	POLLER(self)->queues = Py_NewRef(queues);
	POLLER(self)->drop_event = Py_NewRef(drop_event);
	POLLER(self)->extended = extended;
	POLLER(self)->channel = channel;
	POLLER(self)->spin_ns = spin_ns;
	return self;
}

static int waiters_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct waiters *)self)->tasks);
	return 0;
}

static int poller_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct poller *p = POLLER(self);

	Py_VISIT(p->queues);
	Py_VISIT(p->drop_event);
	for (size_t i = p->first; i != p->end; i++) {
		Py_VISIT(at(p, i)->wr_id);
		Py_VISIT(at(p, i)->made);
	}
	return waiters_traverse(self, visit, arg);
}

static int waiters_clear(PyObject *self)
{
	Py_CLEAR(((struct waiters *)self)->tasks);
	return 0;
}

static void waiters_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	PyObject_GC_UnTrack(self);
	waiters_clear(self);
	Py_XDECREF((PyObject *)((struct waiters *)self)->lock);
	PyObject_GC_Del(self);
	Py_DECREF(type);
}

static void poller_dealloc(PyObject *self)
{
	struct poller *p = POLLER(self);

	PyObject_GC_UnTrack(self);
	for (; p->first != p->end; p->first++) {
		Py_XDECREF(at(p, p->first)->wr_id);
		Py_XDECREF(at(p, p->first)->made);
	}
	PyMem_Free(p->backlog);
	Py_XDECREF(p->queues);
	Py_XDECREF(p->drop_event);
	waiters_dealloc(self);
}

static PyMethodDef waiters_methods[] = {
	RP_METHOD(until),
	{ "release", release, METH_NOARGS, NULL },
	{ "claim", claim, METH_O, NULL },
	{ "unclaim", unclaim, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

#define POLLER_METHOD(name)                                                    \
	{ #name, (PyCFunction)(void (*)(void))poller_##name, METH_FASTCALL,    \
	  NULL }
static PyMethodDef poller_methods[] = {
	POLLER_METHOD(poll),
	POLLER_METHOD(wait),
	POLLER_METHOD(look),
	POLLER_METHOD(notify),
	POLLER_METHOD(keep),
	{ "put_back", poller_put_back, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot waiters_slots[] = {
	{ Py_tp_new, waiters_new },
	{ Py_tp_dealloc, waiters_dealloc },
	{ Py_tp_traverse, waiters_traverse },
	{ Py_tp_clear, waiters_clear },
	{ Py_tp_methods, waiters_methods },
	{ Py_tp_getset, waiters_getset },
	{ 0, NULL },
};

static PyType_Slot poller_slots[] = {
	{ Py_tp_new, poller_new },
	{ Py_tp_dealloc, poller_dealloc },
	{ Py_tp_traverse, poller_traverse },
	{ Py_tp_clear, waiters_clear },
	{ Py_tp_methods, poller_methods },
	{ 0, NULL },
};

static PyType_Spec waiters_spec = {
	.name = "rdmapost._verbs.Waiters",
	.basicsize = sizeof(struct waiters),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = waiters_slots,
};

static PyType_Spec poller_spec = {
	.name = "rdmapost._verbs.Poller",
	.basicsize = sizeof(struct poller),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = poller_slots,
};

/* end_waits(): the interpreter ends. */
static PyObject *end_waits(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	exiting = 1;
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "end_waits", end_waits, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_poller(PyObject *module)
{
	PyObject *waiters = PyType_FromSpec(&waiters_spec);
	PyObject *poller = waiters ? PyType_FromSpecWithBases(&poller_spec,
							      waiters) : NULL;
	int failed = !poller || PyModule_AddFunctions(module, functions) ||
		     PyModule_AddObjectRef(module, "Waiters", waiters) ||
		     PyModule_AddObjectRef(module, "Poller", poller);

	Py_XDECREF(poller);
	Py_XDECREF(waiters);
	return failed ? -1 : 0;
}
