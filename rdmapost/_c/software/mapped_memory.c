/*
 * Memory that soft0 may be unable to access: registered by address, in a dma-buf, or in a mapped
 * file.
 *
 * A real device pins a region's pages, so that unmapping them later does no harm. soft0 runs in the
 * process itself, which would crash: with SIGSEGV, or with SIGBUS if a file was truncated. soft0
 * therefore has the kernel copy such memory; where it is not mapped, the copy fails with EFAULT.
 *
 * A check before a write proves little: the memory may change in between, and in a sandbox the copy
 * needs two new descriptors. So a write may fail even after its check has passed; then the
 * transaction is undone, and repeated with that memory refused (software/transaction.c).
 */
#include "software/internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { BOUNCE = 16384 };

/* The ranges where a write in this transaction has failed although its check had passed. */
static struct {
	uint64_t start, end;
} refused[RP_MAX_REFUSED];
static int refusals; /* RP_MAX_REFUSED + 1: everything is refused */

static int populate(uint64_t addr, uint64_t length)
{
	uint64_t first = addr & ~((uint64_t)sysconf(_SC_PAGESIZE) - 1);
	int failed;

	do
		failed = madvise((void *)(uintptr_t)first, addr + length - first,
				 MADV_POPULATE_WRITE);
	while (failed && (errno == EINTR || errno == EAGAIN));
	return failed;
}

/*
 * Whether, according to /proc/self/maps, all pages from addr to end can be read and, if `writes`,
 * written; -1 if that file cannot be read.
 */
static int is_permitted(uint64_t addr, uint64_t end, int writes)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	uint64_t low, high;
	char *line = NULL, mode[5];
	size_t size = 0;

	if (!maps)
		return -1;
	while (addr < end && getline(&line, &size, maps) > 0)
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &low, &high, mode) == 3 &&
		    low <= addr && addr < high && mode[0] == 'r' && (!writes || mode[1] == 'w'))
			addr = high;
	free(line);
	fclose(maps);
	return addr >= end;
}

/* Whether the last system call failed because a sandbox forbids it. */
static int is_forbidden(void)
{
	return errno == EPERM || errno == ENOSYS || errno == EACCES;
}

/*
 * Copy within this process. `there` must be ordinary memory, which the kernel can pin; `here` may
 * be any address, mapped or not. 0, or -1 if `here` is not mapped.
 */
static int copy_by_kernel(long call, uint64_t here, uint64_t there, uint64_t length)
{
	while (length) {
		struct iovec local = { (void *)(uintptr_t)here, length };
		struct iovec remote = { (void *)(uintptr_t)there, length };
		long n = syscall(call, (long)getpid(), &local, 1L, &remote, 1L, 0L);

		if (n <= 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -1;
		here += (uint64_t)n;
		there += (uint64_t)n;
		length -= (uint64_t)n;
	}
	return 0;
}

/*
 * Copy through a pipe, because a sandbox forbids copy_by_kernel(); both ranges may be unmapped.
 * Returns 0, or an errno: that of pipe2(), or EFAULT.
 */
static int copy_by_pipe(uint64_t to, uint64_t from, uint64_t length)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
		return errno;
	while (length) {
		ssize_t n = write(ends[1], (void *)(uintptr_t)from, length);

		if (n <= 0 || read(ends[0], (void *)(uintptr_t)to, (size_t)n) != n)
			break;
		from += (uint64_t)n;
		to += (uint64_t)n;
		length -= (uint64_t)n;
	}
	close(ends[0]);
	close(ends[1]);
	return length ? EFAULT : 0;
}

void rp_soft_allow_writes(void)
{
	refusals = 0;
}

void rp_soft_refuse_writes(void)
{
	refusals = RP_MAX_REFUSED + 1;
}

static int is_refused(uint64_t start, uint64_t end)
{
	for (int i = 0; i < refusals && refusals <= RP_MAX_REFUSED; i++)
		if (start < refused[i].end && refused[i].start < end)
			return 1;
	return refusals > RP_MAX_REFUSED;
}

static void refuse_range(uint64_t start, uint64_t length)
{
	/*
	 * The range may already have been refused: if there was no memory to raise the exception, a
	 * failed write is repeated.
	 */
	if (is_refused(start, start + length))
		return;
	if (refusals >= RP_MAX_REFUSED) {
		rp_soft_refuse_writes();
		return;
	}
	refused[refusals].start = start;
	refused[refusals++].end = start + length;
}

/* Fault the pages in, as a device does; return whether a write is worth trying. */
static int is_reachable(uint64_t addr, uint64_t length)
{
	if (addr + length < addr || is_refused(addr, addr + length))
		return 0;
	if (!populate(addr, length))
		return 1;
	/*
	 * EINVAL is ambiguous: it can mean pages without the permission, a driver's memory, or a
	 * kernel older than Linux 5.14.
	 */
	if (errno != EINVAL && !is_forbidden())
		return 0;
	/* If /proc/self/maps cannot tell, the write will. */
	return is_permitted(addr, addr + length, 1) != 0;
}

int rp_soft_read(char *to, uint64_t addr, uint64_t length)
{
	if (!copy_by_kernel(SYS_process_vm_writev, addr, (uintptr_t)to, length))
		return 0;
	return is_forbidden() ? copy_by_pipe((uintptr_t)to, addr, length) : EFAULT;
}

/* Write to an address, up to the first part that is not mapped; 0, or an errno. */
static int write_bytes(uint64_t addr, const char *from, uint64_t length)
{
	char bounce[BOUNCE];
	uint64_t size;

	for (; length; addr += size, from += size, length -= size) {
		size = length < BOUNCE ? length : BOUNCE;
		/* Via a buffer: the kernel cannot pin the source if it is a driver's memory. */
		memcpy(bounce, from, size);
		if (!copy_by_kernel(SYS_process_vm_readv, addr, (uintptr_t)bounce, size))
			continue;
		return is_forbidden() ? copy_by_pipe(addr, (uintptr_t)from, length) : EFAULT;
	}
	return 0;
}

/* ---- memory to write to --------------------------------------------------- */

struct room {
	PyObject_HEAD
	uint64_t addr;
	Py_ssize_t length;
	PyObject *keeps; /* keeps the memory alive */
};

#define ROOM(self) ((struct room *)(self))

static PyObject *make_room(PyTypeObject *type, uint64_t addr, Py_ssize_t length, PyObject *keeps)
{
	struct room *r = (struct room *)PyType_GenericAlloc(type, 0);

	if (r) {
		r->addr = addr;
		r->length = length;
		r->keeps = Py_NewRef(keeps);
	}
	return (PyObject *)r;
}

/* Room(addr, length, keeps) */
static PyObject *room_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	unsigned long long addr;
	PyObject *keeps;
	Py_ssize_t length;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "KnO", &addr, &length, &keeps))
		return NULL;
	return make_room(type, addr, length, keeps);
}

static void room_dealloc(PyObject *self)
{
	Py_XDECREF(ROOM(self)->keeps);
	rp_free(self);
}

static Py_ssize_t room_length(PyObject *self)
{
	return ROOM(self)->length;
}

/* room[start:stop]: a Room over part of the same memory. */
static PyObject *room_slice(PyObject *self, PyObject *slice)
{
	Py_ssize_t start, stop, step, length;

	if (PySlice_Unpack(slice, &start, &stop, &step))
		return NULL;
	length = PySlice_AdjustIndices(ROOM(self)->length, &start, &stop, step);
	return make_room(Py_TYPE(self), ROOM(self)->addr + (uint64_t)start, length,
			 ROOM(self)->keeps);
}

/* fill(data): overwrite the memory with data of the same length; raise OSError if that fails. */
static PyObject *room_fill(PyObject *self, PyObject *from)
{
	Py_buffer view;
	int code = -1;

	if (PyObject_GetBuffer(from, &view, PyBUF_SIMPLE))
		return NULL;
	if (view.len == ROOM(self)->length)
		code = write_bytes(ROOM(self)->addr, view.buf, (uint64_t)view.len);
	PyBuffer_Release(&view);
	if (!code)
		Py_RETURN_NONE;
	if (code < 0)
		return PyErr_Format(PyExc_ValueError, "the lengths differ");
	refuse_range(ROOM(self)->addr, (uint64_t)ROOM(self)->length);
	errno = code;
	return PyErr_SetFromErrno(PyExc_OSError);
}

/* read(): the bytes, or None if they are not mapped. */
static PyObject *room_read(PyObject *self, PyObject *unused)
{
	struct room *r = ROOM(self);
	PyObject *bytes = PyBytes_FromStringAndSize(NULL, r->length);

	(void)unused;
	if (!bytes || !rp_soft_read(PyBytes_AsString(bytes), r->addr, (uint64_t)r->length))
		return bytes;
	Py_DECREF(bytes);
	Py_RETURN_NONE;
}

static PyMethodDef room_methods[] = {
	{ "fill", room_fill, METH_O, NULL },
	{ "read", room_read, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot room_slots[] = {
	{ Py_tp_new, room_new },
	{ Py_tp_dealloc, room_dealloc },
	{ Py_tp_methods, room_methods },
	{ Py_mp_length, room_length },
	{ Py_mp_subscript, room_slice },
	{ 0, NULL },
};

/* reachable(addr, length): see is_reachable(). */
static PyObject *reachable(PyObject *self, PyObject *args)
{
	unsigned long long addr, length;

	(void)self;
	if (!PyArg_ParseTuple(args, "KK", &addr, &length))
		return NULL;
	return PyBool_FromLong(is_reachable(addr, length));
}

/* permitted(addr, length, write): see is_permitted(); True if it cannot tell. */
static PyObject *permitted(PyObject *self, PyObject *args)
{
	unsigned long long addr, length;
	int writes;

	(void)self;
	if (!PyArg_ParseTuple(args, "KKp", &addr, &length, &writes))
		return NULL;
	return PyBool_FromLong(addr + length >= addr && is_permitted(addr, addr + length, writes) != 0);
}

static PyMethodDef functions[] = {
	{ "reachable", reachable, METH_VARARGS, NULL },
	{ "permitted", permitted, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_mapped_memory(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Room", sizeof(struct room), 0, room_slots,
			   NULL) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}
